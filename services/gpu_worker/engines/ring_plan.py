"""How a product modulo 2^32 is laid out on the device; see :mod:`gpu_worker.engines.wgpu_plan`.

Padded sizes: ``k`` to a multiple of 16 and ``n`` to a multiple of 128, with zeros, which add nothing.
"""

from __future__ import annotations

from functools import lru_cache

from gpu_worker.engines.wgpu_plan import GemmPlan, PlanLimits, choose_splits, complete_plan, grid2
from gpu_worker.kernels.gemm import TILE_K, TILE_N
from gpu_worker.kernels.ring import RING_ROWS, RingKernel, RingSkinnyKernel, RingTiledKernel

RING_K_ALIGN = TILE_K
# A split shorter than this costs more in partial sums than it gains in parallelism.
_TILED_SPLIT_MIN_K = 256
# Few rows are bound by the weights' bandwidth: more of them in flight, at shorter arithmetic between.
_LONG_UNROLL_ROWS = 4


@lru_cache(maxsize=4096)
def plan_ring(m: int, k: int, n: int, limits: PlanLimits) -> GemmPlan:
    """The kernel, split-K and grid for ``m`` rows and a slab of padded ``k`` and ``n``.

    Raises:
        EngineError: the grid exceeds the device's limits.
    """
    partial_limit = limits.binding_bytes // (4 * m * n)
    layout = _skinny if m <= RING_ROWS[-1] else _tiled
    kernel, splits, grid = layout(m, k, n, limits, partial_limit)
    return complete_plan(kernel, splits, grid, m, n, limits)


_Layout = tuple[RingKernel, int, tuple[int, int, int]]


def _skinny(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    rows = next(rows for rows in RING_ROWS if m <= rows)
    kernel = RingSkinnyKernel(rows=rows, unroll=8 if rows <= _LONG_UNROLL_ROWS else 4)
    groups = n // kernel.group_columns
    splits = choose_splits(-(-k // kernel.chunk), groups, limits.workgroup_target, partial_limit)
    return kernel, splits, (groups, splits, 1)


def _tiled(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    kernel = RingTiledKernel(tile_m=64 if m <= 64 else 128)
    groups = -(-m // kernel.tile_m) * (n // TILE_N)
    split_limit = min(k // _TILED_SPLIT_MIN_K, partial_limit)
    splits = choose_splits(k // TILE_K, groups, limits.workgroup_target, split_limit)
    return kernel, splits, (*grid2(groups, limits.max_groups), splits)
