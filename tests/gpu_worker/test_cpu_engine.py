"""The CPU engine against NumPy in float64.

Error bound. A product of two f16 values is exact in f32 (22 significant bits), so only the K additions of
an element round, each by at most u = 2^-24. Roundings being as good as independent, the error stays below
4 sqrt(K) u sum|a||w| <= 4 sqrt(K) u |a| |w| (Higham and Mary, SIAM J. Sci. Comput. 41, 2019; Cauchy-Schwarz
with the Euclidean norms of the operand row and the weight row). Products of subnormal halves are at least
2^-48, far above f32's smallest normal, so the bound needs no absolute part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines import create_engine
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.cpu import CpuEngine

UNIT = 2.0**-24
ALL_ROWS = (*range(1, 41), 47, 64, 97, 100, 128, 131, 200, 255, 257, 300)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"threads{n}")
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    engine = CpuEngine(request.param)
    yield engine
    engine.close()


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def integers(rng: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    """Small enough that every sum here is exact in f32, in any order."""
    return rng.integers(-8, 9, shape).astype(np.float16)


def multiply(engine: CpuEngine, weight: LoadedWeight, a: NDArray[np.float16]) -> NDArray[np.float32]:
    out = np.full((len(a), weight.d_out), np.nan, np.float32)
    engine.matmul(weight, a, out)
    return out


def assert_close(out: NDArray[np.float32], a: NDArray[np.float16], w: NDArray[np.float16]) -> None:
    a64, w64 = a.astype(np.float64), w.astype(np.float64)
    scale = np.linalg.norm(a64, axis=1)[:, None] * np.linalg.norm(w64, axis=1)[None, :]
    error = np.abs(out - a64 @ w64.T)
    assert (error <= 4 * math.sqrt(a.shape[1]) * UNIT * scale).all()


@pytest.mark.parametrize(("k", "n"), [(576, 960), (101, 67)], ids=["direct", "padded"])
def test_every_row_count(engine: CpuEngine, k: int, n: int) -> None:
    """Every path through the row tiles, into the caller's memory and through the padded scratch."""
    rng = np.random.default_rng(k)
    w = normal(rng, n, k)
    a = normal(rng, max(ALL_ROWS), k)
    weight = engine.load(w)
    for m in ALL_ROWS:
        assert_close(multiply(engine, weight, a[:m]), a[:m], w)


@pytest.mark.parametrize("k", [1, 2, 3, 16, 61, 127, 1031, 1536])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 128, 257, 1021])
def test_integer_products_are_exact(engine: CpuEngine, k: int, n: int) -> None:
    rng = np.random.default_rng(k * 10007 + n)
    w = integers(rng, n, k)
    weight = engine.load(w)
    for m in (1, 2, 3, 5, 11, 13, 16, 29):
        a = integers(rng, m, k)
        expected = a.astype(np.float32) @ w.astype(np.float32).T
        np.testing.assert_array_equal(multiply(engine, weight, a), expected)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 70), k=st.integers(1, 300), n=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_any_shape(engine: CpuEngine, m: int, k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, a = normal(rng, n, k), normal(rng, m, k)
    assert_close(multiply(engine, engine.load(w), a), a, w)


def test_subnormal_operands_and_weights(engine: CpuEngine) -> None:
    """Nothing is flushed to zero: halves below 2^-14, alone and against large ones."""
    rng = np.random.default_rng(5)
    tiny = (rng.integers(-1023, 1024, (33, 61)) * 2.0**-24).astype(np.float16)
    large = (rng.choice([-1, 1], (41, 61)) * rng.uniform(1e4, 6e4, (41, 61))).astype(np.float16)
    assert (np.abs(tiny[tiny != 0]) < 2.0**-14).all()
    for w, a in ((tiny, tiny), (large, tiny[:7]), (tiny, large)):
        assert_close(multiply(engine, engine.load(w), a), a, w)
    smallest = np.full((3, 2), 2.0**-24, np.float16)
    np.testing.assert_array_equal(multiply(engine, engine.load(smallest), smallest), np.float32(2.0**-47))


def test_infinities_and_nans_reach_the_result(engine: CpuEngine) -> None:
    """The engine computes; it hides nothing that the runner's checks must see."""
    w = np.ones((17, 5), np.float16)
    a = np.ones((3, 5), np.float16)
    a[1, 2], a[2, 4] = np.inf, np.nan
    out = multiply(engine, engine.load(w), a)
    assert (out[0] == 5).all()
    assert np.isposinf(out[1]).all()
    assert np.isnan(out[2]).all()


def test_row_views_of_larger_memory(engine: CpuEngine) -> None:
    """Operand and result as the slab gives them: views into one buffer. Nothing beside them is written."""
    rng = np.random.default_rng(8)
    w = integers(rng, 48, 20)
    weight = engine.load(w)
    for m in (1, 3, 7, 16):
        memory = np.full(64 + m * 48 + 64, 7.0, np.float32)
        out = memory[64 : 64 + m * 48].reshape(m, 48)
        a = integers(rng, m + 2, 20)
        engine.matmul(weight, a[1 : m + 1], out)
        np.testing.assert_array_equal(out, a[1 : m + 1].astype(np.float32) @ w.astype(np.float32).T)
        assert (memory[:64] == 7).all()
        assert (memory[64 + m * 48 :] == 7).all()


def test_thousands_of_jobs_back_to_back(engine: CpuEngine) -> None:
    """Jobs of every size in turn, each checked: a chunk done twice, never, or for another job shows."""
    rng = np.random.default_rng(3)
    cases = []
    for m, k, n in [(1, 3, 16), (1, 8, 512), (2, 5, 33), (4, 16, 256), (9, 2, 1040), (1, 1, 1), (3, 7, 90)]:
        w, a = integers(rng, n, k), integers(rng, m, k)
        cases.append((engine.load(w), a, a.astype(np.float32) @ w.astype(np.float32).T))
    for job in range(5000):
        weight, a, expected = cases[(job * 5 + job // 7) % len(cases)]
        out = multiply(engine, weight, a)
        assert np.array_equal(out, expected), f"job {job} of {a.shape}"


def test_jobs_with_pauses_in_which_the_helpers_fall_asleep() -> None:
    engine = CpuEngine(3)
    rng = np.random.default_rng(4)
    w, a = integers(rng, 512, 8), integers(rng, 2, 8)
    weight, expected = engine.load(w), a.astype(np.float32) @ w.astype(np.float32).T
    pause = threading.Event()
    for job in range(60):
        np.testing.assert_array_equal(multiply(engine, weight, a), expected)
        pause.wait(0.02 if job % 3 else 0.001)
    engine.close()


def test_close_ends_the_helpers() -> None:
    before = set(threading.enumerate())
    engine = CpuEngine(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    engine.close()
    assert not any(helper.is_alive() for helper in helpers)


def test_close_wakes_sleeping_helpers() -> None:
    before = set(threading.enumerate())
    engine = CpuEngine(2)
    helpers = set(threading.enumerate()) - before
    threading.Event().wait(0.1)
    engine.close()
    assert not any(helper.is_alive() for helper in helpers)


def test_weights_need_not_outlive_loading() -> None:
    engine = CpuEngine(1)
    w = np.ones((3, 4), np.float16)
    weight = engine.load(w)
    w[...] = np.nan
    assert (multiply(engine, weight, np.ones((2, 4), np.float16)) == 4).all()
    engine.unload(weight)
    engine.close()


def test_misuse_is_an_engine_error() -> None:
    engine = CpuEngine(1)
    weight = engine.load(np.ones((3, 4), np.float16))
    with pytest.raises(EngineError, match="fit"):
        engine.matmul(weight, np.ones((2, 5), np.float16), np.empty((2, 3), np.float32))
    with pytest.raises(EngineError, match="fit"):
        engine.matmul(weight, np.ones((2, 4), np.float16), np.empty((1, 3), np.float32))
    foreign = LoadedWeight(d_in=4, d_out=3, format=WeightFormat.FLOAT16, state=object())
    with pytest.raises(EngineError, match="another engine"):
        engine.matmul(foreign, np.ones((2, 4), np.float16), np.empty((2, 3), np.float32))
    engine.close()


def test_info_and_factory() -> None:
    engine = create_engine("cpu", threads=2)
    assert engine.info.name == "cpu"
    assert engine.info.limits == {"threads": 2}
    assert not engine.info.hardware_gpu
    assert engine.info.adapter
    engine.close()
