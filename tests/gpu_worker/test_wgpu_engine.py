"""The wgpu engine against NumPy, on whatever adapter there is (lavapipe on a machine without a GPU).

Error bound. A product of two f16 values has at most 22 significant bits, so it is exact in f32 and only the
additions round, each by at most u = 2^-24. L additions thus err by at most L u sum|a||w| <= L u |a| |w|
(Cauchy-Schwarz, Euclidean norms of the operand row and the weight row). Roundings being as good as
independent, the error grows like sqrt(L): with a factor 4 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019),
the longest chain here, L = 1536, gives 4 sqrt(1536) 2^-24 = 9.4e-6. Hence 1e-5 |a| |w|; splitting k only
shortens the chains.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_worker.engines import wgpu as engine_module
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.wgpu import WgpuEngine, hardware_gpu_available, pick_adapter
from gpu_worker.engines.wgpu_device import AdapterSummary
from gpu_worker.engines.wgpu_plan import plan_gemm, plan_slabs, rows_per_chunk

RELATIVE_ERROR = 1e-5
ROWS = (1, 2, 9, 15, 16, 17, 31, 64, 130)


@pytest.fixture(scope="module", autouse=True)
def adapter() -> AdapterSummary:
    try:
        return pick_adapter("any")
    except EngineError as error:
        pytest.fail(f"These tests need a Vulkan device: install the package mesa-vulkan-drivers. {error}")


@pytest.fixture(scope="module", params=[True, False], ids=["f16", "u32"])
def engine(request: pytest.FixtureRequest, adapter: AdapterSummary) -> Iterator[WgpuEngine]:
    if request.param and not adapter.has_f16:
        pytest.skip("this adapter has no shader-f16")
    engine = WgpuEngine(adapter=adapter, use_f16=request.param)
    yield engine
    engine.close()


@pytest.fixture
def fresh(adapter: AdapterSummary) -> Iterator[WgpuEngine]:
    engine = WgpuEngine(adapter=adapter)
    yield engine
    engine.close()


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def integers(rng: np.random.Generator, *shape: int) -> NDArray[np.float16]:
    """Small enough that every sum here is exact in f32."""
    return rng.integers(-8, 9, shape).astype(np.float16)


def multiply(engine: WgpuEngine, weight: LoadedWeight, a: NDArray[np.float16]) -> NDArray[np.float32]:
    out = np.full((a.shape[0], weight.d_out), np.nan, np.float32)
    engine.matmul(weight, a, out)
    return out


def assert_close(out: NDArray[np.float32], a: NDArray[np.float16], w: NDArray[np.float16]) -> None:
    a64, w64 = a.astype(np.float64), w.astype(np.float64)
    scale = np.linalg.norm(a64, axis=1)[:, None] * np.linalg.norm(w64, axis=1)[None, :]
    np.testing.assert_array_less(np.abs(out - a64 @ w64.T), RELATIVE_ERROR * scale + 1e-30)


def check(engine: WgpuEngine, a: NDArray[np.float16], w: NDArray[np.float16]) -> None:
    weight = engine.load(w)
    try:
        assert_close(multiply(engine, weight, a), a, w)
    finally:
        engine.unload(weight)


# --- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(576, 960), (577, 961), (1, 1), (1536, 576), (1499, 1), (3, 1493)])
def test_products_match_float64(engine: WgpuEngine, k: int, n: int) -> None:
    rng = np.random.default_rng(k * 10007 + n)
    w = normal(rng, n, k)
    weight = engine.load(w)
    for m in ROWS:
        a = normal(rng, m, k)
        assert_close(multiply(engine, weight, a), a, w)
    engine.unload(weight)


@pytest.mark.parametrize("k", [2, 5, 61, 67, 127, 131, 509, 1031])
@pytest.mark.parametrize("n", [7, 127, 257, 1021])
def test_integer_products_are_exact(engine: WgpuEngine, k: int, n: int) -> None:
    rng = np.random.default_rng(k * 10007 + n)
    w = integers(rng, n, k)
    weight = engine.load(w)
    for m in (5, 23):
        a = integers(rng, m, k)
        np.testing.assert_array_equal(
            multiply(engine, weight, a), a.astype(np.float32) @ w.astype(np.float32).T
        )
    engine.unload(weight)


@settings(max_examples=15, deadline=None)
@given(m=st.integers(1, 70), k=st.integers(1, 300), n=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_any_shape(engine: WgpuEngine, m: int, k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(engine, normal(rng, m, k), normal(rng, n, k))


def test_subnormal_and_large_values_survive(engine: WgpuEngine) -> None:
    rng = np.random.default_rng(1)
    tiny = (rng.integers(1, 1024, (5, 200)) * 2.0**-24).astype(np.float16)
    assert np.all((tiny > 0) & (tiny < np.finfo(np.float16).smallest_normal))
    check(engine, normal(rng, 3, 200), tiny)
    check(engine, tiny, normal(rng, 9, 200))
    largest = np.full((2, 100), np.finfo(np.float16).max, np.float16)
    check(engine, largest, largest)


def test_nan_stays_in_its_row_and_call(engine: WgpuEngine) -> None:
    rng = np.random.default_rng(2)
    wide, narrow = normal(rng, 70, 128), normal(rng, 70, 33)
    loaded_wide, loaded_narrow = engine.load(wide), engine.load(narrow)
    for m in (9, 40):
        a = normal(rng, m, 128)
        poisoned = a.copy()
        poisoned[4] = np.nan
        out = multiply(engine, loaded_wide, poisoned)
        assert np.all(np.isnan(out[4]))
        others = np.arange(m) != 4
        assert_close(out[others], a[others], wide)
        # The padding of the next operand lies where the NaNs were.
        multiply(engine, loaded_wide, np.full((m, 128), np.nan, np.float16))
        assert_close(multiply(engine, loaded_narrow, a[:, :33]), a[:, :33], narrow)
    engine.unload(loaded_wide)
    engine.unload(loaded_narrow)


def test_strided_arrays(engine: WgpuEngine) -> None:
    rng = np.random.default_rng(3)
    w, a = normal(rng, 30, 20), normal(rng, 20, 12).T
    out = np.full((12, 60), np.nan, np.float32)[:, ::2]
    weight = engine.load(np.asfortranarray(w))
    engine.matmul(weight, a, out)
    assert_close(out, a, w)
    engine.unload(weight)


def test_split_k_with_reduction(adapter: AdapterSummary) -> None:
    rng = np.random.default_rng(4)
    engine = WgpuEngine(adapter=adapter, workgroup_target=264)
    limits = engine._on.limits
    for m, k, n in [(9, 1536, 576), (16, 1471, 130), (3, 640, 128), (31, 1536, 200), (130, 1024, 300)]:
        assert plan_gemm(m, -(-k // 64) * 64, -(-n // 128) * 128, limits).splits > 1
        check(engine, normal(rng, m, k), normal(rng, n, k))
    engine.close()


@pytest.mark.parametrize("workgroup_target", [None, 264])
def test_slabs_and_chunks(adapter: AdapterSummary, workgroup_target: int | None) -> None:
    rng = np.random.default_rng(5)
    engine = WgpuEngine(
        adapter=adapter, max_binding_bytes=1 << 17, chunk_bytes=1 << 16, workgroup_target=workgroup_target
    )
    w = normal(rng, 1301, 257)
    slabs = plan_slabs(320, 1301, engine._on.limits)
    rows = rows_per_chunk(320, 1408, 1 << 16, engine._on.limits)
    assert len(slabs) > 5
    assert 1 < rows < 16
    weight = engine.load(w)
    assert engine.resident_bytes == 2 * 320 * 1408
    for m in (1, rows, rows + 1, 5 * rows + 2):
        a = normal(rng, m, 257)
        assert_close(multiply(engine, weight, a), a, w)
    engine.close()


def test_large_tiles_over_several_chunks(adapter: AdapterSummary) -> None:
    rng = np.random.default_rng(6)
    engine = WgpuEngine(adapter=adapter, chunk_bytes=70 * 4 * 256)
    check(engine, normal(rng, 300, 100), normal(rng, 200, 100))
    engine.close()


def test_portable_calls(adapter: AdapterSummary) -> None:
    rng = np.random.default_rng(7)
    engine = WgpuEngine(adapter=adapter, use_native=False, chunk_bytes=1 << 16)
    for m, k, n in [(1, 100, 100), (16, 577, 130), (100, 300, 200), (2, 64, 900)]:
        check(engine, normal(rng, m, k), normal(rng, n, k))
    engine.close()


# --- resources ---------------------------------------------------------------------------------------------


def test_many_shapes_in_sequence_with_several_resident_weights(fresh: WgpuEngine) -> None:
    rng = np.random.default_rng(8)
    weights = [normal(rng, n, k) for k, n in [(64, 900), (700, 40), (129, 127), (1, 300), (500, 500)]]
    loaded = [fresh.load(w) for w in weights]
    for step in range(40):
        index = step % len(weights)
        a = normal(rng, int(rng.integers(1, 60)), weights[index].shape[1])
        assert_close(multiply(fresh, loaded[index], a), a, weights[index])
        if step % 7 == 6:
            fresh.unload(loaded[index])
            loaded[index] = fresh.load(weights[index])


def test_a_repeated_call_allocates_nothing_large(fresh: WgpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    w, a = normal(rng, 1024, 1024), normal(rng, 16, 1024)
    out = np.empty((16, 1024), np.float32)
    weight = fresh.load(w)
    fresh.matmul(weight, a, out)

    def refuse(**_: object) -> None:
        raise AssertionError("created on the hot path")

    for name in ("create_buffer", "create_bind_group", "create_shader_module", "create_compute_pipeline"):
        monkeypatch.setattr(fresh._on.device, name, refuse)
    tracemalloc.start()
    fresh.matmul(weight, a, out)
    fresh.matmul(weight, a[:9], out[:9])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 1024, "the operand alone has 32 KiB, the result 64"


def test_unload_frees(fresh: WgpuEngine) -> None:
    first, second = (fresh.load(np.ones((300, 200), np.float16)) for _ in range(2))
    assert fresh.resident_bytes == 2 * (2 * 256 * 384)
    fresh.unload(first)
    assert fresh.resident_bytes == 2 * 256 * 384
    for use in (lambda: fresh.unload(first), lambda: multiply(fresh, first, np.ones((1, 200), np.float16))):
        with pytest.raises(EngineError, match="not loaded"):
            use()
    np.testing.assert_array_equal(multiply(fresh, second, np.ones((1, 200), np.float16)), 200.0)
    fresh.unload(second)
    assert fresh.resident_bytes == 0


def test_a_weight_of_another_engine_is_refused(fresh: WgpuEngine, engine: WgpuEngine) -> None:
    weight = fresh.load(np.ones((2, 2), np.float16))
    with pytest.raises(EngineError, match="not loaded"):
        multiply(engine, weight, np.ones((1, 2), np.float16))


def test_close_twice_and_use_after_close(adapter: AdapterSummary) -> None:
    engine = WgpuEngine(adapter=adapter)
    weight = engine.load(np.ones((2, 2), np.float16))
    multiply(engine, weight, np.ones((1, 2), np.float16))
    engine.close()
    engine.close()
    assert engine.resident_bytes == 0
    for use in (
        lambda: engine.load(np.ones((2, 2), np.float16)),
        lambda: multiply(engine, weight, np.ones((1, 2), np.float16)),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_info_and_hardware_agree(engine: WgpuEngine, adapter: AdapterSummary) -> None:
    info = engine.info
    assert info.name == "wgpu"
    assert adapter.name in info.adapter
    assert adapter.device_type in info.adapter
    assert info.backend == adapter.backend
    assert info.hardware_gpu == adapter.hardware_gpu == hardware_gpu_available()
    assert ("shader-f16" in info.features) == engine._on.limits.f16
    assert {"max-storage-buffer-binding-size", "max-buffer-size"} <= info.limits.keys()
    assert "WgpuEngine" in engine_module.__all__


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight", [np.ones((2, 2), np.float32), np.ones(4, np.float16), np.ones((0, 3), np.float16)]
)
def test_bad_weights_are_refused(engine: WgpuEngine, weight: NDArray[np.float16]) -> None:
    with pytest.raises(EngineError, match="matrix of float16, int8 or int16"):
        engine.load(weight)


@pytest.mark.parametrize(
    ("operand", "out"),
    [
        (np.ones((1, 4), np.float16), np.empty((1, 3), np.float32)),
        (np.ones((1, 5), np.float32), np.empty((1, 3), np.float32)),
        (np.ones((0, 5), np.float16), np.empty((0, 3), np.float32)),
        (np.ones((1, 5), np.float16), np.empty((1, 4), np.float32)),
        (np.ones((1, 5), np.float16), np.empty((1, 3), np.float64)),
        (np.ones((1, 5), np.float16), np.broadcast_to(np.float32(0), (1, 3))),
    ],
)
def test_bad_operands_are_refused(engine: WgpuEngine, operand: NDArray, out: NDArray) -> None:
    weight = engine.load(np.ones((3, 5), np.float16))
    with pytest.raises(EngineError):
        engine.matmul(weight, operand, out)
    engine.unload(weight)


def test_a_weight_beyond_the_limits_is_refused(adapter: AdapterSummary) -> None:
    engine = WgpuEngine(adapter=adapter, max_binding_bytes=1 << 16)
    with pytest.raises(EngineError, match="storage binding"):
        engine.load(np.ones((1, 257), np.float16))
    with pytest.raises(EngineError, match="one row"):
        engine.load(np.ones((16385, 1), np.float16))
    engine.close()


def test_out_of_memory_is_reported_and_leaves_nothing(
    adapter: AdapterSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wgpu

    engine = WgpuEngine(adapter=adapter, max_binding_bytes=1 << 16)
    create = engine._on.device.create_buffer
    created = []

    def second_fails(**options: object) -> object:
        if created:
            raise wgpu.GPUOutOfMemoryError("not enough memory left")
        created.append(create(**options))
        return created[0]

    monkeypatch.setattr(engine._on.device, "create_buffer", second_fails)
    with pytest.raises(EngineError, match="out of memory"):
        engine.load(np.ones((1000, 64), np.float16))
    monkeypatch.undo()
    assert engine.resident_bytes == 0
    check(engine, np.ones((2, 64), np.float16), np.ones((1000, 64), np.float16))
    engine.close()


def test_a_lost_device_is_an_engine_error(adapter: AdapterSummary) -> None:
    engine = WgpuEngine(adapter=adapter)
    if engine._on.native is None:
        pytest.skip("this wgpu-py hides the native calls")
    weight = engine.load(np.ones((4, 4), np.float16))
    multiply(engine, weight, np.ones((1, 4), np.float16))
    engine._on.device.destroy()
    for _ in range(2):
        with pytest.raises(EngineError, match="lost"):
            multiply(engine, weight, np.ones((1, 4), np.float16))
