"""How products modulo 2^32 are laid out on a device: kernels, splits, slabs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.ring_plan import plan_ring
from gpu_worker.engines.wgpu_plan import PlanLimits, plan_slabs
from gpu_worker.kernels.ring import RING_ROWS, RingSkinnyKernel, RingTiledKernel

H200 = PlanLimits(
    binding_bytes=2**31, workgroup_bytes=49152, max_groups=65535, workgroup_target=264, f16=False
)


def test_plan_kernels_follow_the_rows() -> None:
    rows = [getattr(plan_ring(m, 576, 1024, H200).kernel, "rows", 0) for m in (1, 2, 3, 5, 8, 9, 16, 17)]
    assert rows == [1, 2, 4, 8, 8, 16, 16, 0]
    assert plan_ring(17, 576, 1024, H200).kernel == RingTiledKernel()


def test_a_device_is_filled_evenly() -> None:
    """152 workgroups would leave one of 132 multiprocessors with twice the work of most others."""
    for m in (1, 16, 64):
        splits = plan_ring(m, 2560, 19456, H200).splits
        waves = 152 * splits / 132
        assert waves / np.ceil(waves) > 0.9
    assert plan_ring(16, 2560, 151936, H200).splits == 1, "enough columns: partial sums would only cost"


@given(
    m=st.integers(1, 5000),
    k=st.integers(1, 800).map(lambda i: 16 * i),
    n=st.integers(1, 2000).map(lambda i: 128 * i),
    binding=st.integers(16, 31).map(lambda i: 2**i),
)
def test_plans_respect_the_limits(m: int, k: int, n: int, binding: int) -> None:
    limits = PlanLimits(
        binding_bytes=binding, workgroup_bytes=16384, max_groups=65535, workgroup_target=264, f16=False
    )
    plan = plan_ring(m, k, n, limits)
    assert plan.partial_bytes <= binding
    assert max(*plan.grid, *plan.reduce_grid) <= limits.max_groups
    assert plan.kernel.threads <= 256
    assert plan.kernel.workgroup_bytes <= limits.workgroup_bytes
    assert plan.reduce_grid[0] * plan.reduce_grid[1] * 128 * 4 >= m * n
    chunk = getattr(plan.kernel, "chunk", 16)
    units = -(-k // chunk)
    assert (plan.splits - 1) * -(-units // plan.splits) < units, "an empty split"


@given(k=st.integers(1, 160).map(lambda i: 16 * i), n=st.integers(1, 5000), binding=st.integers(2**19, 2**24))
def test_slabs_cover_the_columns_once(k: int, n: int, binding: int) -> None:
    limits = PlanLimits(
        binding_bytes=binding, workgroup_bytes=16384, max_groups=65535, workgroup_target=8, f16=False
    )
    slabs = plan_slabs(k, n, limits, item_bytes=1)
    assert slabs[0].start == 0
    assert slabs[-1].stop == n
    assert all(before.end == after.start == before.stop for before, after in pairwise(slabs))
    assert all(slab.width % 128 == 0 and k * slab.width <= binding for slab in slabs)
    assert sum(slab.width for slab in slabs) == -(-n // 128) * 128


def test_unsupported_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        RingSkinnyKernel(rows=3).source()


def test_workgroup_memory_fits_the_smallest_adapter() -> None:
    for rows in RING_ROWS:
        assert RingSkinnyKernel(rows=rows).workgroup_bytes <= 16384
    assert RingTiledKernel().workgroup_bytes <= 16384
