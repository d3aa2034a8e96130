"""Slots: taken, given back, overwritten; what each layer stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tee_runner.decoder.config import DecoderConfig, LayerConfig, RopeConfig
from tee_runner.decoder.kv_cache import KvCache, KvDtype, kv_cache_bytes
from tee_runner.errors import CapacityError

CONFIG = DecoderConfig(
    family="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=10, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4), tie_word_embeddings=True,
)  # fmt: skip


ROPE = RopeConfig(theta=1e4)
LOCAL = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, rope=ROPE, window=9)
GLOBAL = LayerConfig(num_heads=4, num_kv_heads=1, head_dim=16, intermediate_size=48, rope=ROPE)


def of_layers(*layers: LayerConfig) -> DecoderConfig:
    return replace(CONFIG, num_layers=len(layers), layers=layers)


MIXED = of_layers(LOCAL, GLOBAL, replace(LOCAL, kv_source=0), replace(GLOBAL, kv_source=1))


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", np.float32), ("bfloat16", np.uint16), ("int8", np.int8)]
)
def test_shape_and_type(dtype: KvDtype, stored: type) -> None:
    cache = KvCache(CONFIG, slots=3, max_len=20, dtype=dtype)
    assert len(cache.keys) == len(cache.values) == 2
    for array in (*cache.keys, *cache.values):
        assert array.shape == (3, 20, 16)
        assert array.dtype == stored
    for scales in (*cache.key_scales, *cache.value_scales):
        assert scales.shape == ((3, 20, 2) if dtype == "int8" else (0, 0, 0))
        assert scales.dtype == np.float32


def test_every_slot_is_given_out_once() -> None:
    cache = KvCache(CONFIG, slots=3, max_len=20)
    slots = {cache.take() for _ in range(3)}
    assert slots == {0, 1, 2}
    assert cache.free_slots == 0
    with pytest.raises(CapacityError, match="Wait"):
        cache.take()
    cache.release(1)
    assert cache.free_slots == 1
    assert cache.take() == 1


def everything(cache: KvCache) -> list[np.ndarray]:
    """Every array that holds something of a sequence."""
    arrays = [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]
    return [array for array in arrays if array.size]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("finished", [False, True])
def test_release_overwrites_what_was_written(dtype: KvDtype, finished: bool) -> None:
    cache = KvCache(CONFIG, slots=2, max_len=20, dtype=dtype)
    kept, slot = cache.take(), cache.take()
    for owner, count in ((kept, 20), (slot, 7)):
        assert cache.reserve(owner, count) == 0
        for array in everything(cache):
            array[owner, :count] = 5
    if finished:
        cache.lengths[slot] = 7
    cache.release(slot)
    assert cache.lengths[slot] == 0
    for array in everything(cache):
        assert not array[slot].any()
        assert (array[kept] == 5).all()


@pytest.mark.parametrize("length", [30, 64, 65, 1000])
def test_release_overwrites_a_whole_ring(length: int) -> None:
    cache = KvCache(MIXED, slots=2, max_len=1000, dtype="int8", longest_chunk=8)
    slot = cache.take()
    for position in range(0, length, 8):
        cache.lengths[slot] = position
        cache.reserve(slot, min(8, length - position))
        for array in everything(cache):
            array[slot, np.arange(position, min(position + 8, length)) % array.shape[1]] = 5
    cache.release(slot)
    assert not any(array.any() for array in everything(cache))


def test_local_layers_keep_a_ring() -> None:
    for max_len in (200, 5_000, 100_000):
        cache = KvCache(MIXED, slots=1, max_len=max_len, longest_chunk=100)
        # 9 + 100 - 1 positions, in whole blocks of 64.
        assert [keys.shape for keys in cache.keys] == [(1, 128, 16), (1, max_len, 16)] * 2
        local, full = 128 * 16 * 2 * 4, max_len * 16 * 2 * 4
        assert cache.nbytes == local + full
    # Without a bound on a chunk, or where a ring saves nothing, every position is kept.
    assert KvCache(MIXED, slots=1, max_len=200).keys[0].shape == (1, 200, 16)
    assert KvCache(MIXED, slots=1, max_len=110, longest_chunk=100).keys[0].shape == (1, 110, 16)


def test_a_ring_reaches_as_far_as_its_readers() -> None:
    wider = of_layers(LOCAL, replace(LOCAL, kv_source=0, window=80))
    assert KvCache(wider, slots=1, max_len=900, longest_chunk=10).keys[0].shape == (1, 128, 16)
    whole = of_layers(LOCAL, replace(LOCAL, kv_source=0, window=None))
    assert KvCache(whole, slots=1, max_len=900, longest_chunk=10).keys[0].shape == (1, 900, 16)


def test_layers_that_read_others_share_their_arrays() -> None:
    cache = KvCache(MIXED, slots=2, max_len=20, dtype="int8")
    for part in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        assert part[2] is part[0]
        assert part[3] is part[1]
    assert cache.nbytes == 2 * 20 * 2 * (2 * (8 + 4) + (16 + 4))


@pytest.mark.parametrize(
    "layers",
    [
        (replace(LOCAL, kv_source=1), LOCAL),
        (replace(LOCAL, kv_source=0),),
        (LOCAL, replace(LOCAL, kv_source=0), replace(LOCAL, kv_source=1)),
        (LOCAL, replace(GLOBAL, kv_source=0)),
    ],
)
def test_impossible_sharing_is_refused(layers: tuple[LayerConfig, ...]) -> None:
    with pytest.raises(ValueError, match="reads the keys of layer"):
        KvCache(of_layers(*layers), slots=1, max_len=20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("config", [CONFIG, MIXED])
@pytest.mark.parametrize("chunk", [None, 1, 50])
def test_the_size_is_known_beforehand(dtype: KvDtype, config: DecoderConfig, chunk: int | None) -> None:
    cache = KvCache(config, slots=3, max_len=200, dtype=dtype, longest_chunk=chunk)
    assert cache.nbytes == kv_cache_bytes(config, slots=3, max_len=200, dtype=dtype, longest_chunk=chunk)


def test_a_ring_refuses_a_longer_chunk() -> None:
    cache = KvCache(MIXED, slots=1, max_len=1000, longest_chunk=100)
    slot = cache.take()
    cache.reserve(slot, 100)
    with pytest.raises(ValueError, match="101 rows"):
        cache.reserve(slot, 101)
    assert KvCache(CONFIG, slots=1, max_len=1000, longest_chunk=100).reserve(0, 101) == 0


def test_reserve_gives_the_length_and_refuses_what_does_not_fit() -> None:
    cache = KvCache(CONFIG, slots=1, max_len=20)
    slot = cache.take()
    assert cache.reserve(slot, 20) == 0
    cache.lengths[slot] = 12
    assert cache.reserve(slot, 8) == 12
    with pytest.raises(CapacityError, match="21 tokens"):
        cache.reserve(slot, 9)
    assert cache.lengths[slot] == 12
