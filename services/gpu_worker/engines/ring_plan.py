"""How a product modulo 2^32 is laid out on the device; see :mod:`gpu_worker.engines.wgpu_plan`.

Padded sizes: ``k`` to a multiple of 16 and ``n`` to a multiple of 128, with zeros, which add nothing.
"""

from __future__ import annotations

from functools import lru_cache

from gpu_worker.engines.wgpu_plan import GemmPlan, PlanLimits, complete_plan, grid2
from gpu_worker.kernels.gemm import TILE_K, TILE_N
from gpu_worker.kernels.ring import RING_ROWS, RING_TILE_M, RingKernel, RingSkinnyKernel, RingTiledKernel

RING_K_ALIGN = TILE_K
# A split shorter than this costs more in partial sums than it gains in parallelism.
_TILED_SPLIT_MIN_K = 256
# More workgroups than this for each that fills the device gain nothing.
_SPLIT_FACTOR = 4
# What makes a split slow, fitted to measurements of 60 products on a large GPU (132 multiprocessors): partial
# sums, as so many of k a split, and multiprocessors with few threads to hide a load's latency.
_PARTIAL_K = 32
_LATENCY_THREADS = 40


@lru_cache(maxsize=4096)
def plan_ring(m: int, k: int, n: int, limits: PlanLimits) -> GemmPlan:
    """The kernel, split-K and grid for ``m`` rows and a slab of padded ``k`` and ``n``.

    Raises:
        EngineError: the grid exceeds the device's limits.
    """
    partial_limit = limits.binding_bytes // (4 * m * n)
    kernel: RingKernel
    if m <= RING_ROWS[-1]:
        kernel = RingSkinnyKernel(rows=next(rows for rows in RING_ROWS if m <= rows))
        groups = n // kernel.group_columns
        splits = _choose_splits(-(-k // kernel.chunk), k, groups, kernel.threads, limits, partial_limit)
        return complete_plan(kernel, splits, (groups, splits, 1), m, n, limits)
    kernel = RingTiledKernel()
    groups = -(-m // RING_TILE_M) * (n // TILE_N)
    split_limit = min(k // _TILED_SPLIT_MIN_K, partial_limit)
    splits = _choose_splits(k // TILE_K, k, groups, kernel.threads, limits, split_limit)
    return complete_plan(kernel, splits, (*grid2(groups, limits.max_groups), splits), m, n, limits)


def _choose_splits(steps: int, k: int, groups: int, threads: int, limits: PlanLimits, limit: int) -> int:
    """Into how many parts to split k, of ``steps`` indivisible steps; none is empty.

    Args:
        steps: of k.
        k: padded.
        groups: workgroups of one part.
        threads: of a workgroup.
        limits: ``workgroup_target`` is taken for two workgroups for each multiprocessor.
        limit: the most parts.
    """
    processors = max(1, limits.workgroup_target // 2)

    def slowness(splits: int) -> float:
        total = groups * splits
        waves = -(-total // processors)
        in_flight = threads * total / processors
        return waves * processors / total * (1 + _PARTIAL_K * splits / k) * (1 + _LATENCY_THREADS / in_flight)

    most = max(1, min(steps, limit, _SPLIT_FACTOR * limits.workgroup_target // groups))
    return min(sorted({-(-steps // -(-steps // wanted)) for wanted in range(1, most + 1)}), key=slowness)
