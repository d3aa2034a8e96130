"""What the wgpu engine decides before it uses a device: the adapter, plans, slabs, sizes, kernels."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.base import EngineError
from gpu_worker.engines.wgpu import hardware_gpu_available, list_adapters
from gpu_worker.engines.wgpu_device import AdapterSummary, choose_adapter, open_device
from gpu_worker.engines.wgpu_plan import PlanLimits, choose_splits, plan_gemm, plan_slabs
from gpu_worker.engines.wgpu_staging import grown_size
from gpu_worker.kernels.gemm import SkinnyKernel, TiledKernel

H200 = PlanLimits(
    binding_bytes=2**31, workgroup_bytes=49152, max_groups=65535, workgroup_target=264, f16=True
)


# --- adapters ----------------------------------------------------------------------------------------------


def summary(device_type: str, backend: str = "Vulkan", **limits: int) -> AdapterSummary:
    enough = {
        "max-compute-workgroup-storage-size": 32768,
        "max-compute-invocations-per-workgroup": 1024,
        "max-compute-workgroup-size-x": 1024,
        "max-storage-buffers-per-shader-stage": 8,
        "max-uniform-buffers-per-shader-stage": 8,
    }
    return AdapterSummary(
        name=f"a {device_type}", backend=backend, device_type=device_type, driver="", limits=enough | limits
    )


def test_adapter_preference() -> None:
    cpu, virtual, integrated, discrete = map(summary, ("cpu", "virtual", "integrated", "discrete"))
    gl = summary("discrete", backend="OpenGL")
    weak = summary("discrete", **{"max-compute-workgroup-storage-size": 8192})
    assert choose_adapter([cpu, gl, weak, virtual, integrated, discrete], "hardware") == discrete
    assert choose_adapter([cpu, gl, weak, virtual, integrated], "hardware") == integrated
    assert choose_adapter([cpu, gl, weak, virtual], "any") == virtual
    assert choose_adapter([cpu, gl, weak], "any") == cpu
    with pytest.raises(EngineError, match=r"software device.*mesa-vulkan-drivers"):
        choose_adapter([cpu], "hardware")
    with pytest.raises(EngineError, match="OpenGL is not supported"):
        choose_adapter([gl], "any")
    with pytest.raises(EngineError, match="8192, 16384 needed"):
        choose_adapter([weak], "any")
    with pytest.raises(EngineError, match="none found"):
        choose_adapter([], "any")


def test_an_adapter_without_f16_is_not_opened_with_it() -> None:
    with pytest.raises(EngineError, match="shader-f16"):
        open_device(summary("discrete"), use_f16=True)


def test_auto_selection_without_wgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpu", None)
    assert not hardware_gpu_available()
    with pytest.raises(EngineError, match="cannot list"):
        list_adapters()


@pytest.mark.parametrize("adapters", [[], None])
def test_auto_selection_without_vulkan(
    monkeypatch: pytest.MonkeyPatch, adapters: list[object] | None
) -> None:
    def enumerate_adapters_sync() -> list[object]:
        if adapters is None:
            raise RuntimeError("no loader")
        return adapters

    fake = SimpleNamespace(gpu=SimpleNamespace(enumerate_adapters_sync=enumerate_adapters_sync))
    monkeypatch.setitem(sys.modules, "wgpu", fake)
    assert not hardware_gpu_available()


# --- plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "columns", "slices", "splits"),
    [(2560, 6144, 8, 4, 10), (2560, 19456, 8, 4, 3), (9728, 2560, 4, 8, 13)],
)
def test_plans_measured_best_on_a_large_gpu(k: int, n: int, columns: int, slices: int, splits: int) -> None:
    plan = plan_gemm(16, k, n, H200)
    assert plan.kernel == SkinnyKernel(rows=16, columns=columns, slices=slices, chunk=128, f16=True)
    assert plan.splits == plan.grid[1] == splits
    assert plan.partial_bytes == 4 * splits * 16 * n


def test_plan_kernels_follow_the_rows() -> None:
    rows = [getattr(plan_gemm(m, 576, 1024, H200).kernel, "rows", 0) for m in (1, 4, 5, 8, 9, 16, 17)]
    assert rows == [4, 4, 8, 8, 16, 16, 0]
    assert plan_gemm(64, 576, 1024, H200).kernel == TiledKernel(tile_m=64, f16=True)
    assert plan_gemm(65, 576, 1024, H200).kernel == TiledKernel(tile_m=128, f16=True)
    small = PlanLimits(
        binding_bytes=2**27, workgroup_bytes=16384, max_groups=65535, workgroup_target=264, f16=True
    )
    assert plan_gemm(500, 576, 1024, small).kernel == TiledKernel(tile_m=64, f16=True)


def test_a_software_device_splits_little() -> None:
    cpu = PlanLimits(
        binding_bytes=2**27, workgroup_bytes=32768, max_groups=65535, workgroup_target=8, f16=True
    )
    assert plan_gemm(16, 576, 49152, cpu).splits == 1
    assert plan_gemm(16, 1536, 576, cpu).splits == 2
    assert plan_gemm(16, 576, 3072, cpu).partial_bytes == 0


@given(
    m=st.integers(1, 5000),
    k=st.integers(1, 200).map(lambda i: 64 * i),
    n=st.integers(1, 2000).map(lambda i: 128 * i),
    binding=st.integers(16, 31).map(lambda i: 2**i),
)
def test_plans_respect_the_limits(m: int, k: int, n: int, binding: int) -> None:
    limits = PlanLimits(
        binding_bytes=binding, workgroup_bytes=16384, max_groups=65535, workgroup_target=264, f16=False
    )
    plan = plan_gemm(m, k, n, limits)
    assert plan.partial_bytes <= binding
    assert max(*plan.grid, *plan.reduce_grid) <= limits.max_groups
    assert plan.kernel.threads <= 256
    assert plan.kernel.workgroup_bytes <= limits.workgroup_bytes
    assert plan.reduce_grid[0] * plan.reduce_grid[1] * 128 * 4 >= m * n


@given(
    units=st.integers(1, 500),
    groups=st.integers(1, 500),
    target=st.integers(1, 500),
    limit=st.integers(0, 99),
)
def test_no_split_is_empty(units: int, groups: int, target: int, limit: int) -> None:
    splits = choose_splits(units, groups, target, limit)
    per_split = -(-units // splits)
    assert 1 <= splits <= max(1, limit)
    assert (splits - 1) * per_split < units <= splits * per_split


@given(k=st.integers(1, 40).map(lambda i: 64 * i), n=st.integers(1, 5000), binding=st.integers(2**20, 2**24))
def test_slabs_cover_the_columns_once(k: int, n: int, binding: int) -> None:
    limits = PlanLimits(
        binding_bytes=binding, workgroup_bytes=16384, max_groups=65535, workgroup_target=8, f16=True
    )
    slabs = plan_slabs(k, n, limits)
    assert slabs[0].start == 0
    assert slabs[-1].stop == n
    assert all(before.end == after.start == before.stop for before, after in pairwise(slabs))
    assert all(slab.width % 128 == 0 and 2 * k * slab.width <= binding for slab in slabs)
    assert sum(slab.width for slab in slabs) == -(-n // 128) * 128


def test_buffers_grow_geometrically_to_the_limit() -> None:
    assert grown_size(0, 1, 1 << 30) == 64 * 1024
    assert grown_size(100_000, 100_001, 1 << 30) == 200_000
    assert grown_size(100_000, 50_000, 1 << 30) == 100_000
    assert grown_size(100_000, 500_001, 1 << 30) == 500_224
    assert grown_size(600_000, 600_100, 700_000) == 699_904
    with pytest.raises(EngineError, match="allows"):
        grown_size(0, 700_001, 700_000)


@pytest.mark.parametrize(
    "kernel",
    [
        SkinnyKernel(rows=5, columns=8, slices=4, chunk=64, f16=False),
        SkinnyKernel(rows=8, columns=2, slices=4, chunk=64, f16=False),
        SkinnyKernel(rows=8, columns=8, slices=8, chunk=96, f16=False),
        TiledKernel(tile_m=32, f16=False),
    ],
)
def test_unsupported_kernels_are_refused(kernel: SkinnyKernel | TiledKernel) -> None:
    with pytest.raises(ValueError, match="must be"):
        kernel.source()
