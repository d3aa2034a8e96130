"""The CPU engine's AMX path, against NumPy in float64, and its way back to vector instructions.

Every test means something on a machine without AMX, too: then the engine must say so and be right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_worker.engines import amx
from gpu_worker.engines.cpu import CpuEngine
from gpu_worker.engines.memory import aligned_bytes

Halves = NDArray[np.float16]

HAS_AMX = not amx.unavailable()


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"threads{n}")
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    engine = CpuEngine(request.param, use_amx=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def vector_engine() -> Iterator[CpuEngine]:
    engine = CpuEngine(1, use_amx=False)
    yield engine
    engine.close()


def normal(rng: np.random.Generator, *shape: int) -> Halves:
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def cut(values: Halves) -> Halves:
    """Values with at most 8 significant bits, as from a bf16 checkpoint."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float16)


def product(engine: CpuEngine, w: Halves, a: Halves) -> NDArray[np.float32]:
    out = np.full((len(a), len(w)), np.nan, np.float32)
    engine.matmul(engine.load(w), a, out)
    return out


def check(engine: CpuEngine, w: Halves, a: Halves) -> None:
    a64, w64 = a.astype(np.float64), w.astype(np.float64)
    scale = np.linalg.norm(a64, axis=1)[:, None] * np.linalg.norm(w64, axis=1)[None, :]
    error = np.abs(product(engine, w, a) - a64 @ w64.T)
    # Additions in f32: far inside the 1e-5 that is asked for, and far below a dropped part.
    assert (error <= 4 * np.sqrt(a.shape[1]) * 2.0**-24 * scale).all()


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_every_finite_half_is_the_sum_of_its_parts() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[(every & 0x7C00) != 0x7C00]
    for depth in (32, 31, 62):  # whole steps, and steps that end early
        rows = len(finite) // depth
        operand = finite[-rows * depth :].reshape(rows, depth)
        tiles = np.full(amx.tiles_shape(rows, depth), 0xFFFF, np.uint16)
        assert amx.split_operand(operand, tiles)
        blocks, steps, _, height, step = tiles.shape
        parts = from_bf16(tiles.transpose(2, 0, 3, 1, 4).reshape(2, blocks * height, steps * step)[:, :rows])
        assert (parts[:, :, depth:] == 0).all()
        high, low = parts[:, :, :depth]
        np.testing.assert_array_equal(high + low, operand.view(np.float16).astype(np.float32))
        # Nothing that AMX would flush: each part is zero or a normal bf16.
        assert (np.abs(parts[parts != 0]) >= 2.0**-24).all()


def test_operands_that_are_not_finite_are_noticed() -> None:
    for bits in (0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF):
        for place in (0, 31, 32, 39):
            operand = np.zeros((3, 40), np.uint16)
            operand[2, place] = bits
            assert not amx.split_operand(operand, np.zeros(amx.tiles_shape(3, 40), np.uint16))


def test_parts_that_weights_need() -> None:
    values = np.array([1, -1.5, 65504 - 2**5 * 7, 2.0**-24, 255 * 2.0**-24, 0], np.float16)
    assert amx.planes_needed(cut(values).view(np.uint16)) == 1
    for extra in (2047, 1 + 2.0**-10, 257 * 2.0**-24, -65504):
        assert amx.planes_needed(np.append(values, np.float16(extra)).view(np.uint16)) == 2
    for extra in (np.inf, -np.inf, np.nan):
        assert amx.planes_needed(np.append(values, np.float16(extra)).view(np.uint16)) == 0


@pytest.mark.parametrize("rows", [1, 5, 9, 16, 17, 32, 33])
@pytest.mark.parametrize("offset", [0, 16])
def test_results_on_lines_and_off_them(engine: CpuEngine, rows: int, offset: int) -> None:
    """Those on lines, as in a slab, are written past the caches; nothing beyond either is touched."""
    rng = np.random.default_rng(rows)
    weight, operand = normal(rng, 192, 96), normal(rng, rows, 96)
    words = aligned_bytes(4 * (rows + 2) * 192).view(np.float32)
    words.fill(np.nan)
    out = words[192 + offset // 4 :][: rows * 192].reshape(rows, 192)
    assert out.ctypes.data % 64 == offset
    engine.matmul(engine.load(weight), operand, out)
    np.testing.assert_array_equal(out, product(engine, weight, operand))
    before, after = words[: 192 + offset // 4], words[192 + offset // 4 + rows * 192 :]
    assert np.isnan(before).all()
    assert np.isnan(after).all()


def test_the_engine_says_what_it_uses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engines = [CpuEngine(1), CpuEngine(1, use_amx=True), CpuEngine(1, use_amx=False)]
    used = ["amx-bf16" in engine.info.features for engine in engines]
    assert used == [HAS_AMX, HAS_AMX, False]
    assert all(("avx512f" in e.info.features) == ("avx512f" in amx.target_features()) for e in engines)
    assert ("no AMX" in caplog.text) == (not HAS_AMX)
    for engine in engines:
        engine.close()


def test_a_machine_without_amx(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(amx, "unavailable", lambda: "made up")
    monkeypatch.setattr(amx, "kernels", lambda: pytest.fail("compiled without AMX"))
    with caplog.at_level(logging.WARNING):
        engine = CpuEngine(2, use_amx=True)
    assert "made up" in caplog.text
    assert "amx-bf16" not in engine.info.features
    rng = np.random.default_rng(1)
    check(engine, normal(rng, 67, 45), normal(rng, 21, 45))
    engine.close()


@pytest.mark.parametrize("failure", ["wrong", "raises"])
def test_a_failed_self_test(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    def addresses() -> dict[int, int]:
        if failure == "raises":
            raise RuntimeError("no code")
        return {}

    monkeypatch.setattr(amx, "unavailable", lambda: "")
    monkeypatch.setattr(amx, "kernel_addresses", addresses)
    if failure == "wrong":
        monkeypatch.setattr(CpuEngine, "_self_test", lambda self: False)
    engine = CpuEngine(1)
    assert "using vector instructions" in caplog.text
    assert "amx-bf16" not in engine.info.features
    rng = np.random.default_rng(1)
    check(engine, normal(rng, 67, 45), normal(rng, 21, 45))
    engine.close()


@pytest.mark.parametrize("native", [False, True], ids=["f16", "bf16"])
@pytest.mark.parametrize(("k", "n"), [(576, 192), (1031, 131), (37, 1), (1, 67), (256, 64), (289, 100)])
def test_every_row_count(engine: CpuEngine, k: int, n: int, native: bool) -> None:
    rng = np.random.default_rng(k + n)
    w, a = normal(rng, n, k), normal(rng, 1030, k)
    w = cut(w) if native else w
    for m in (*range(1, 41), 47, 48, 49, 63, 64, 65, 96, 97, 127, 128, 130, 257, 513, 1025):
        check(engine, w, a[:m])


@pytest.mark.parametrize("m", [5, 16, 29, 70])
def test_results_are_exact_where_f32_is(engine: CpuEngine, m: int) -> None:
    """Integers of 11 bits: every sum below 2^24 is exact, so all four products must be there."""
    rng = np.random.default_rng(m)
    a, w = np.zeros((m, 100), np.float16), np.zeros((77, 100), np.float16)
    a[:, [3, 50, 99]] = rng.integers(-2047, 2048, (m, 3))
    w[:, [3, 50, 99]] = rng.integers(-2047, 2048, (77, 3))
    np.testing.assert_array_equal(product(engine, w, a), a.astype(np.float32) @ w.astype(np.float32).T)


@pytest.mark.parametrize("m", [2, 7, 16, 33])
def test_denormals_and_the_largest_values(engine: CpuEngine, m: int) -> None:
    rng = np.random.default_rng(m)
    tiny = (rng.integers(-1023, 1024, (m + 50, 61)) * 2.0**-24).astype(np.float16)
    large = (rng.choice([-1, 1], (m + 50, 61)) * rng.uniform(6e4, 65504, (m + 50, 61))).astype(np.float16)
    for w, a in ((tiny, tiny), (large, tiny), (tiny, large), (large, large)):
        check(engine, w[m:], a[:m])
    smallest = np.full((m, 2), 2.0**-24, np.float16)
    assert (product(engine, smallest, smallest) == 2.0**-47).all()
    largest = np.full((m, 4096), 65504, np.float16)
    np.testing.assert_allclose(product(engine, largest, largest), 65504.0**2 * 4096, rtol=1e-5)


@pytest.mark.parametrize("m", [3, 16, 40])
def test_infinities_and_nans_are_those_of_the_vector_kernel(
    engine: CpuEngine, vector_engine: CpuEngine, m: int
) -> None:
    rng = np.random.default_rng(m)
    w, a = normal(rng, 35, 70), normal(rng, m, 70)
    for matrix, place, value in ((a, (1, 69), np.inf), (a, (2, 0), np.nan), (w, (34, 5), -np.inf)):
        kept = matrix[place]
        matrix[place] = value
        out, expected = product(engine, w, a), product(vector_engine, w, a)
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(out), np.isinf(expected))
        assert not np.isfinite(out).all()
        matrix[place] = kept


@pytest.mark.parametrize("native", [False, True], ids=["f16", "bf16"])
def test_both_kernels_agree(engine: CpuEngine, vector_engine: CpuEngine, native: bool) -> None:
    rng = np.random.default_rng(9)
    w, a = normal(rng, 123, 345), normal(rng, 37, 345)
    w = cut(w) if native else w
    bound = 1e-5 * np.linalg.norm(a.astype(float), axis=1)[:, None] * np.linalg.norm(w.astype(float), axis=1)
    for m in (1, 2, 5, 9, 16, 17, 37):
        assert (np.abs(product(engine, w, a[:m]) - product(vector_engine, w, a[:m])) <= bound[:m]).all()


def test_operands_with_gaps_and_nothing_written_outside(engine: CpuEngine) -> None:
    rng = np.random.default_rng(8)
    w = rng.integers(-8, 9, (64, 50)).astype(np.float16)
    weight = engine.load(w)
    for m in (5, 16, 21, 70):
        wide = rng.integers(-8, 9, (m, 80)).astype(np.float16)
        memory = np.full(64 + m * 64 + 64, 7.0, np.float32)
        out = memory[64 : 64 + m * 64].reshape(m, 64)
        for a in (wide[:, 10:60], wide[::-1, :50]):
            engine.matmul(weight, a, out)
            np.testing.assert_array_equal(out, a.astype(np.float32) @ w.astype(np.float32).T)
        assert (memory[:64] == 7).all()
        assert (memory[64 + m * 64 :] == 7).all()
