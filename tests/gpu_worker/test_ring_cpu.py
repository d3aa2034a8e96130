"""Products modulo 2^32 on the CPU, against NumPy's wrapping uint32 arithmetic: always equal, never close."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from multiprocessing import shared_memory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines import ring_cpu
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.ring_amx import blocks_needed
from gpu_worker.engines.ring_cpu import KERNELS, KernelName, RingCpu, RingPanels
from gpu_worker.engines.ring_product import FEW_ROWS
from gpu_worker.engines.ring_weights import INT16_MAX, operand_shifts, weight_bytes
from gpu_worker.engines.team import Team

Words = NDArray[np.uint32]

ALL_ROWS = (*range(1, 42), 47, 63, 64, 65, 96, 97, 255, 256, 257, 300, 521)
AVAILABLE = [name for name in KERNELS if not ring_cpu._STARTS[name][0]()]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"threads{n}")
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param)
    yield team
    team.close()


@pytest.fixture(scope="module", params=AVAILABLE)
def ring(request: pytest.FixtureRequest, team: Team) -> RingCpu:
    ring = RingCpu(team, (request.param,))
    assert ring.kernel == request.param
    return ring


@pytest.fixture
def one() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()


def words(rng: np.random.Generator, *shape: int) -> Words:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def int8(rng: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    return rng.integers(-128, 128, shape, dtype=np.int8)


def int16(rng: np.random.Generator, *shape: int) -> NDArray[np.int16]:
    return rng.integers(-32768, INT16_MAX, shape, dtype=np.int16, endpoint=True)


def expected(y: Words, w: NDArray[np.int8] | NDArray[np.int16]) -> Words:
    # Casting a negative integer to uint32 adds 2^32.
    return y @ w.astype(np.uint32).T


def multiply(ring: RingCpu, weight: LoadedWeight, y: Words) -> Words:
    out = np.full((len(y), weight.d_out), 0xABCDEF01, np.uint32)
    ring.matmul(weight, y, out)
    return out


def check(ring: RingCpu, y: Words, w: NDArray[np.int8] | NDArray[np.int16]) -> None:
    np.testing.assert_array_equal(multiply(ring, ring.load(w), y), expected(y, w))


def test_the_reference_is_that_of_whole_numbers() -> None:
    rng = np.random.default_rng(0)
    for w in (int8(rng, 3, 50), int16(rng, 3, 50)):
        y = words(rng, 2, 50)
        exact = [[sum(int(a) * int(b) for a, b in zip(r, c, strict=True)) % 2**32 for c in w] for r in y]
        np.testing.assert_array_equal(expected(y, w), np.array(exact, np.uint32))


@pytest.mark.parametrize(("k", "n"), [(1100, 67), (64, 128)], ids=["cut", "whole"])
def test_every_row_count(ring: RingCpu, k: int, n: int) -> None:
    rng = np.random.default_rng(k)
    w, y = int8(rng, n, k), words(rng, max(ALL_ROWS), k)
    weight, product = ring.load(w), expected(y, w)
    for m in ALL_ROWS:
        np.testing.assert_array_equal(multiply(ring, weight, y[:m]), product[:m])


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 80), k=st.integers(1, 400), n=st.integers(1, 300), seed=st.integers(0, 1 << 30),
    wide=st.booleans(),
)  # fmt: skip
def test_any_shape(ring: RingCpu, m: int, k: int, n: int, seed: int, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    check(ring, words(rng, m, k), int16(rng, n, k) if wide else int8(rng, n, k))


@pytest.mark.parametrize("k", [1, 2, 63, 65, 127, 1031])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 61, 64, 65, 257])
def test_primes_and_edges(ring: RingCpu, k: int, n: int) -> None:
    rng = np.random.default_rng(k * 1009 + n)
    for m in (1, 5, 19):
        check(ring, words(rng, m, k), int8(rng, n, k))


def test_thousands_of_rows(ring: RingCpu) -> None:
    rng = np.random.default_rng(5)
    check(ring, words(rng, 4096, 70), int8(rng, 19, 70))
    check(ring, words(rng, 2500, 3), int16(rng, 1, 3))


@pytest.mark.parametrize("m", [1, 3, 4, 7, 16, 40])
def test_extremes(ring: RingCpu, m: int) -> None:
    """Sums far beyond 2^32 that saturating or widening arithmetic would get wrong."""
    k = 3000
    for value in (0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0xFF, 0xFF000000, 0xFFFF0000, 1, 0):
        y = np.full((m, k), value, np.uint32)
        for weight in (-128, 127, -1, 0):
            w = np.full((18, k), weight, np.int8)
            check(ring, y, w)
        for weight in (-32768, INT16_MAX, 128, -129, 255):
            check(ring, y, np.full((2, k), weight, np.int16))


def test_int16_weights_are_two_bytes() -> None:
    every = np.arange(-32768, INT16_MAX + 1, dtype=np.int16).reshape(1, -1)
    parts = [weight_bytes(every, shift).astype(np.int64) << shift for shift in operand_shifts(every)]
    np.testing.assert_array_equal(sum(parts), every)
    assert all(weight_bytes(every, shift).dtype == np.int8 for shift in operand_shifts(every))


def test_an_operand_in_shared_memory_is_read_and_left_alone(ring: RingCpu) -> None:
    rng = np.random.default_rng(7)
    memory = shared_memory.SharedMemory(create=True, size=4 * (20 * 100 + 20 * 33) + 64)
    try:
        y = np.ndarray((20, 100), np.uint32, memory.buf)
        out = np.ndarray((20, 33), np.uint32, memory.buf, offset=y.nbytes + 64)
        y[...] = words(rng, 20, 100)
        before = y.copy()
        for w in (int8(rng, 33, 100), int16(rng, 33, 100)):
            weight = ring.load(w)
            for m in (1, 9, 20):
                ring.matmul(weight, y[:m], out[:m])
                np.testing.assert_array_equal(out[:m], expected(before[:m], w))
                np.testing.assert_array_equal(y, before)
        del y, out
    finally:
        memory.close()
        memory.unlink()


def test_nothing_is_written_outside_the_result(ring: RingCpu) -> None:
    rng = np.random.default_rng(8)
    for n in (1, 16, 31, 64, 100):
        w = int8(rng, n, 1100)
        weight = ring.load(w)
        for m in (1, 2, 3, 5, 16, 21, 70):
            memory = np.full(64 + m * n + 64, 7, np.uint32)
            out = memory[64 : 64 + m * n].reshape(m, n)
            y = words(rng, m, 1100)
            ring.matmul(weight, y, out)
            np.testing.assert_array_equal(out, expected(y, w))
            assert (memory[:64] == 7).all()
            assert (memory[64 + m * n :] == 7).all()


def test_arrays_with_gaps(ring: RingCpu) -> None:
    rng = np.random.default_rng(9)
    w = int8(rng, 60, 40)[:, ::2]
    weight = ring.load(np.asfortranarray(w))
    wide, out = words(rng, 13, 50), np.zeros((13, 120), np.uint32)
    for y in (wide[:, 10:30], wide[::-1, :20], wide.T[:13, ::-1][:, :13].repeat(2, axis=1)[:, :20]):
        ring.matmul(weight, y, out[:, ::2])
        np.testing.assert_array_equal(out[:, ::2], expected(y, w))
    assert (out[:, 1::2] == 0).all()


def test_scratch_is_reused_and_what_it_held_does_not_matter(ring: RingCpu) -> None:
    rng = np.random.default_rng(10)
    shapes = [(40, 300, 70), (1, 1, 1), (9, 65, 64), (3, 299, 5), (40, 300, 70), (17, 10, 33)]
    cases = []
    for m, k, n in shapes:
        w, y = int8(rng, n, k), words(rng, m, k)
        cases.append((ring.load(w), y, expected(y, w)))
    multiply(ring, *cases[0][:2])
    scratch = ring._scratch
    for job in range(600):
        weight, y, product = cases[(job * 5 + job // 7) % len(cases)]
        assert np.array_equal(multiply(ring, weight, y), product), f"job {job} of {y.shape}"
    assert ring._scratch is scratch


def test_weights_need_not_outlive_loading(ring: RingCpu) -> None:
    for w in (np.ones((3, 4), np.int8), np.ones((3, 4), np.int16)):
        weight = ring.load(w)
        w[...] = 99
        assert (multiply(ring, weight, np.ones((2, 4), np.uint32)) == 4).all()
        ring.unload(weight)


def test_a_weight_takes_a_byte_a_value(ring: RingCpu) -> None:
    for kind, size in ((np.int8, 1), (np.int16, 2)):
        state = ring.load(np.zeros((128, 192), kind)).state
        assert isinstance(state, RingPanels)
        assert state.packed.nbytes == size * 128 * 192
        assert state.address % 64 == 0


def test_blocks_cover_the_rows() -> None:
    for rows in range(1, 1000):
        blocks, height = blocks_needed(rows)
        assert 1 <= height <= 4
        assert blocks == 1 or blocks % 2 == 0
        assert rows <= blocks * height < rows + 2 * height + (blocks > 1) * blocks


@pytest.mark.parametrize(
    ("lost", "left"), [((), AVAILABLE[0]), (("amx",), None), (("amx", "dots"), "words")]
)  # fmt: skip
def test_missing_instructions(
    one: Team, monkeypatch: pytest.MonkeyPatch, lost: tuple[KernelName, ...], left: str | None
) -> None:
    def refuse() -> None:
        raise AssertionError("compiled without the instructions")

    for name in lost:
        monkeypatch.setitem(ring_cpu._STARTS, name, (lambda: "made up", refuse))
    ring = RingCpu(one)
    assert ring.kernel == (left or next(name for name in AVAILABLE if name not in lost))
    rng = np.random.default_rng(1)
    check(ring, words(rng, 21, 45), int8(rng, 67, 45))


@pytest.mark.parametrize("failure", ["wrong", "raises"])
def test_a_failed_self_test(
    one: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    first = AVAILABLE[0]
    if failure == "raises":

        def fail() -> None:
            raise RuntimeError("no code")

        monkeypatch.setitem(ring_cpu._STARTS, first, (lambda: "", fail))
    else:
        honest = RingCpu.matmul

        def off_by_one(self: RingCpu, weight: LoadedWeight, y: Words, out: Words) -> None:
            honest(self, weight, y, out)
            if self.kernels[1, 0] == KERNELS.index(first):
                out[-1, -1] += 1

        monkeypatch.setattr(RingCpu, "matmul", off_by_one)
    with caplog.at_level(logging.WARNING):
        if first == "words":
            with pytest.raises(EngineError, match="none of the kernels"):
                RingCpu(one)
            return
        ring = RingCpu(one)
    assert first in caplog.text
    assert ring.kernel != first
    rng = np.random.default_rng(1)
    check(ring, words(rng, 21, 45), int8(rng, 67, 45))


def test_few_rows_use_dot_products_where_there_are_any(one: Team) -> None:
    ring = RingCpu(one)
    few, many = (KERNELS[int(kind)] for kind in ring.kernels[:, 0])
    assert (few, many) == ("dots" if "dots" in AVAILABLE else AVAILABLE[0], AVAILABLE[0])
    rng = np.random.default_rng(2)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1, 5):
        check(ring, words(rng, rows, 130), int8(rng, 67, 130))
    for name in AVAILABLE:
        alone = RingCpu(one, (name,))
        assert set(alone.kernels[:, 0].tolist()) == {KERNELS.index(name)}


def test_no_kernel_is_an_error(one: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ring_cpu._STARTS, "amx", (lambda: "made up", lambda: None))
    with pytest.raises(EngineError, match="amx runs"):
        RingCpu(one, ("amx",))


def test_misuse_is_an_engine_error(one: Team) -> None:
    ring = RingCpu(one, ("words",))
    for bad in (np.ones((3, 4)), np.ones(4, np.int8), np.ones((0, 4), np.int8), np.ones((3, 4), np.uint8)):
        with pytest.raises(EngineError, match="int8 or int16 matrix"):
            ring.load(bad)
    with pytest.raises(EngineError, match="exceed 32639"):
        ring.load(np.full((1, 1), INT16_MAX + 1, np.int16))
    weight = ring.load(np.ones((3, 4), np.int8))
    for y_shape, out_shape in (((2, 5), (2, 3)), ((2, 4), (1, 3)), ((2, 4), (2, 4))):
        with pytest.raises(EngineError, match="fit"):
            ring.matmul(weight, np.ones(y_shape, np.uint32), np.empty(out_shape, np.uint32))
    for y, out in (
        (np.ones((2, 4), np.int32), np.empty((2, 3), np.uint32)),
        (np.ones((2, 4), np.uint32), np.empty((2, 3), np.uint64)),
        (np.ones((0, 4), np.uint32), np.empty((0, 3), np.uint32)),
        (np.ones(4, np.uint32), np.empty(3, np.uint32)),
    ):
        with pytest.raises(EngineError, match="uint32"):
            ring.matmul(weight, y, out)
    foreign = LoadedWeight(d_in=4, d_out=3, format=WeightFormat.INT8, state=object())
    with pytest.raises(EngineError, match="another engine"):
        ring.matmul(foreign, np.ones((2, 4), np.uint32), np.empty((2, 3), np.uint32))
