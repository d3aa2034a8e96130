"""The weight store: what is accepted, what is evicted."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gelo.formats import WeightFormat
from gelo.header import MAX_DIMENSION
from gpu_worker.engines.base import EngineError
from gpu_worker.weights import UploadError, WeightStore, weight_key

from .conftest import NumpyEngine, Weight, integer_weight, make_weight


def make_store(capacity: int = 1 << 20) -> tuple[WeightStore, NumpyEngine]:
    engine = NumpyEngine()
    return WeightStore(engine, threading.RLock(), capacity=capacity), engine


def key(weight: Weight) -> bytes:
    d_out, d_in = weight.values.shape
    return weight_key(weight.digest, d_in, d_out, weight.format)


def add(store: WeightStore, weight: Weight, chunks: Iterable[bytes] | None = None) -> None:
    d_out, d_in = weight.values.shape
    store.add(weight.digest, d_in, d_out, weight.format, [weight.data] if chunks is None else chunks)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 210), max_size=6))
def test_any_chunking_gives_the_same_weight(cuts: list[int]) -> None:
    store, engine = make_store()
    weight = make_weight(15, 7)
    edges = [0, *sorted(cuts), len(weight.data)]
    add(store, weight, [weight.data[a:b] for a, b in pairwise(edges)])
    assert key(weight) in store
    (loaded,) = engine.resident
    assert (loaded.d_in, loaded.d_out) == (7, 15)
    np.testing.assert_array_equal(loaded.state, weight.values)
    assert store.resident_bytes == 210


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-2], "208 of the announced 210"),
        (lambda data: b"", "0 of the announced 210"),
        (lambda data: data + b"\0", "more than the announced"),
        (lambda data: data * 2, "more than the announced"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "SHA-256"),
        (lambda data: data[::-1], "SHA-256"),
    ],
    ids=["short", "empty", "long", "double", "flipped", "reversed"],
)
def test_wrong_bytes_are_refused(change: object, message: str) -> None:
    store, engine = make_store()
    weight = make_weight(15, 7)
    assert callable(change)
    with pytest.raises(UploadError, match=message):
        add(store, weight, [change(weight.data)])
    assert key(weight) not in store
    assert not engine.resident
    assert store.resident_bytes == 0


def test_an_endless_upload_is_cut_off_at_the_announced_size() -> None:
    store, _ = make_store()
    weight = make_weight(15, 7)
    taken = 0

    def endless() -> Iterable[bytes]:
        nonlocal taken
        while True:
            taken += 100
            yield bytes(100)

    with pytest.raises(UploadError, match="more than"):
        add(store, weight, endless())
    assert taken == 300


@pytest.mark.parametrize(
    ("digest", "d_in", "d_out"),
    [
        (bytes(31), 1, 1),
        (bytes(33), 1, 1),
        (b"", 1, 1),
        (bytes(32), 0, 1),
        (bytes(32), 1, 0),
        (bytes(32), MAX_DIMENSION + 1, 1),
        (bytes(32), 1, MAX_DIMENSION + 1),
        (bytes(32), 2**32 - 1, 2**32 - 1),
    ],
)
def test_bad_references_are_refused_before_a_byte_is_read(digest: bytes, d_in: int, d_out: int) -> None:
    store, _ = make_store()

    def unread() -> Iterable[bytes]:
        raise AssertionError("read")
        yield b""

    with pytest.raises(UploadError, match="bounds"):
        store.add(digest, d_in, d_out, WeightFormat.FLOAT16, unread())


def test_a_weight_beyond_the_capacity_is_refused_before_memory_is_taken() -> None:
    store, _ = make_store(capacity=209)
    with pytest.raises(UploadError, match="limit"):
        add(store, make_weight(15, 7))
    store, _ = make_store(capacity=1 << 60)
    with pytest.raises(UploadError, match="limit"):
        store.add(bytes(32), MAX_DIMENSION, MAX_DIMENSION, WeightFormat.FLOAT16, [])


def test_adding_twice_loads_once() -> None:
    store, engine = make_store()
    add(store, make_weight(15, 7))
    add(store, make_weight(15, 7))
    assert len(engine.resident) == 1
    assert store.resident_bytes == 210


def test_the_same_bytes_in_another_shape_are_another_weight() -> None:
    store, _ = make_store()
    wide, tall = Weight(np.ones((2, 6), np.float16)), Weight(np.ones((6, 2), np.float16))
    assert wide.digest == tall.digest
    add(store, wide)
    with pytest.raises(KeyError):
        store.bind([key(tall)])
    add(store, tall)
    assert [w.d_in for w in store.bind([key(wide), key(tall)])] == [6, 2]


def test_each_format_has_its_size_and_type() -> None:
    store, engine = make_store(capacity=7 * 15 * (2 + 1 + 2))
    weights = (make_weight(15, 7), integer_weight(15, 7), integer_weight(15, 7, bits=16))
    for weight in weights:
        add(store, weight)
    assert [loaded.format for loaded in engine.resident] == list(WeightFormat)
    for weight, loaded in zip(weights, store.bind([key(w) for w in weights]), strict=True):
        assert loaded.size == len(weight.data)
        wide = weight.values.astype(np.float32 if weight.format == WeightFormat.FLOAT16 else np.uint32)
        np.testing.assert_array_equal(loaded.state, wide)
    assert store.resident_bytes == 7 * 15 * 5
    with pytest.raises(UploadError, match="no room"):
        add(store, integer_weight(1, 1, seed=9))


def test_the_same_bytes_in_another_format_are_another_weight() -> None:
    store, _ = make_store()
    halves = make_weight(6, 4)
    shorts, bytes_ = Weight(halves.values.view(np.int16)), Weight(halves.values.view(np.int8))
    assert halves.digest == shorts.digest == bytes_.digest
    add(store, halves)
    for other in (shorts, bytes_):
        with pytest.raises(KeyError):
            store.bind([key(other)])
        add(store, other)
    loaded = store.bind([key(w) for w in (halves, shorts, bytes_)])
    assert [(w.format, w.d_in) for w in loaded] == [
        (WeightFormat.FLOAT16, 4), (WeightFormat.INT16, 4), (WeightFormat.INT8, 8),
    ]  # fmt: skip
    assert store.resident_bytes == 3 * 48


@pytest.mark.parametrize("bits", [8, 16])
def test_integer_weights_of_the_wrong_length_are_refused(bits: int) -> None:
    store, _ = make_store()
    weight = integer_weight(15, 7, bits=bits)
    for data in (weight.data[:-1], weight.data + b"\0", weight.data * 2):
        with pytest.raises(UploadError, match="announced"):
            add(store, weight, [data])
    assert store.resident_bytes == 0


def test_the_least_recently_bound_goes_first() -> None:
    store, engine = make_store(capacity=3 * 200)
    a, b, c, d = (make_weight(10, 10, seed) for seed in range(4))
    for weight in (a, b, c):
        add(store, weight)
    store.release([key(a)] if store.bind([key(a)]) else [])
    add(store, d)
    assert [key(w) in store for w in (a, b, c, d)] == [True, False, True, True]
    assert store.resident_bytes == 600
    assert len(engine.resident) == 3


def test_bound_weights_stay() -> None:
    store, _ = make_store(capacity=400)
    a, b, c = (make_weight(10, 10, seed) for seed in range(3))
    add(store, a)
    add(store, b)
    store.bind([key(a)])
    store.bind([key(a), key(b)])
    with pytest.raises(UploadError, match="no room"):
        add(store, c)
    assert key(a) in store
    assert key(b) in store
    store.release([key(a), key(b)])
    add(store, c)
    assert [key(w) in store for w in (a, b, c)] == [True, False, True]
    with pytest.raises(UploadError, match="no room"):
        add(store, make_weight(11, 10, 9))
    store.release([key(a)])
    add(store, make_weight(20, 10, 9))
    assert store.resident_bytes == 400


def test_a_failed_bind_binds_nothing() -> None:
    store, _ = make_store(capacity=200)
    a, b = make_weight(10, 10, 0), make_weight(10, 10, 1)
    add(store, a)
    with pytest.raises(KeyError):
        store.bind([key(a), key(b)])
    add(store, b)
    assert key(a) not in store


def test_one_session_may_bind_a_weight_twice() -> None:
    store, _ = make_store(capacity=200)
    a = make_weight(10, 10, 0)
    add(store, a)
    first, second = store.bind([key(a), key(a)])
    assert first is second
    store.release([key(a), key(a)])
    add(store, make_weight(10, 10, 1))
    assert key(a) not in store


def test_an_engine_that_cannot_load_leaves_the_store_as_it_was() -> None:
    store, engine = make_store()
    weight = make_weight(10, 10)
    engine.failing = True
    with pytest.raises(EngineError):
        add(store, weight)
    assert store.resident_bytes == 0
    engine.failing = False
    add(store, weight)
    assert store.resident_bytes == 200
