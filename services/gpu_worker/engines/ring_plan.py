"""How a product modulo 2^32 is laid out on the device; see :mod:`gpu_worker.engines.wgpu_plan`.

Padded sizes: ``k`` to a multiple of 16 and ``n`` to a multiple of 128, with zeros, which add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gpu_worker.engines.base import EngineError
from gpu_worker.engines.wgpu_plan import PlanLimits, Slab, choose_splits, round_up
from gpu_worker.kernels.ring import (
    RING_REDUCE_THREADS,
    RING_ROWS,
    RING_TILE_K,
    RING_TILE_N,
    RingKernel,
    RingSkinnyKernel,
    RingTiledKernel,
)

RING_K_ALIGN = RING_TILE_K
RING_N_ALIGN = RING_TILE_N
# A split shorter than this costs more in partial sums than it gains in parallelism.
_TILED_SPLIT_MIN_K = 256
# Few rows are bound by the weights' bandwidth: more of them in flight, at shorter arithmetic between.
_LONG_UNROLL_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """One product of an operand chunk and a weight slab.

    With ``splits`` > 1 the kernel leaves ``partial_bytes`` of partial sums, which a second dispatch of
    ``reduce_grid`` workgroups adds.
    """

    kernel: RingKernel
    splits: int
    grid: tuple[int, int, int]
    reduce_grid: tuple[int, int, int]
    partial_bytes: int


def plan_ring_slabs(k: int, n: int, limits: PlanLimits) -> tuple[Slab, ...]:
    """Cuts an int8 weight of padded depth ``k`` and ``n`` real columns into slabs of nearly equal width.

    Raises:
        EngineError: even the narrowest slab exceeds the device's binding limit.
    """
    widest = min(limits.binding_bytes // k, limits.max_groups * RING_N_ALIGN) // RING_N_ALIGN * RING_N_ALIGN
    if widest == 0:
        raise EngineError(
            f"a weight of depth {k} needs a storage binding of {k * RING_N_ALIGN} bytes; "
            f"this adapter allows {limits.binding_bytes}"
        )
    padded = round_up(n, RING_N_ALIGN)
    count = -(-padded // widest)
    width = round_up(-(-padded // count), RING_N_ALIGN)
    starts = range(0, padded, width)
    return tuple(
        Slab(start=start, stop=min(start + width, n), width=min(width, padded - start)) for start in starts
    )


def ring_rows_per_chunk(k: int, n: int, chunk_bytes: int, limits: PlanLimits) -> int:
    """How many operand rows fit one submission, given padded ``k`` and ``n``.

    Raises:
        EngineError: not even one row of operand or result fits the device's binding limit.
    """
    row_bytes = 4 * max(k, n)
    if row_bytes > limits.binding_bytes:
        raise EngineError(
            f"one row of the product needs a storage binding of {row_bytes} bytes; "
            f"this adapter allows {limits.binding_bytes}"
        )
    return max(1, min(chunk_bytes, limits.binding_bytes) // row_bytes)


@lru_cache(maxsize=4096)
def plan_ring(m: int, k: int, n: int, limits: PlanLimits) -> RingPlan:
    """The kernel, split-K and grid for ``m`` rows and a slab of padded ``k`` and ``n``.

    Raises:
        EngineError: the grid exceeds the device's limits.
    """
    partial_limit = limits.binding_bytes // (4 * m * n)
    layout = _skinny if m <= RING_ROWS[-1] else _tiled
    kernel, splits, grid = layout(m, k, n, limits, partial_limit)
    plan = RingPlan(
        kernel=kernel,
        splits=splits,
        grid=grid,
        reduce_grid=(*_grid2(-(-m * n // 4 // RING_REDUCE_THREADS), limits.max_groups), 1),
        partial_bytes=4 * splits * m * n if splits > 1 else 0,
    )
    _check(plan, limits)
    return plan


_Layout = tuple[RingKernel, int, tuple[int, int, int]]


def _skinny(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    rows = next(rows for rows in RING_ROWS if m <= rows)
    kernel = RingSkinnyKernel(rows=rows, unroll=8 if rows <= _LONG_UNROLL_ROWS else 4)
    groups = n // kernel.group_columns
    splits = choose_splits(-(-k // kernel.chunk), groups, limits.workgroup_target, partial_limit)
    return kernel, splits, (groups, splits, 1)


def _tiled(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    kernel = RingTiledKernel(tile_m=64 if m <= 64 else 128)
    groups = -(-m // kernel.tile_m) * (n // RING_TILE_N)
    split_limit = min(k // _TILED_SPLIT_MIN_K, partial_limit)
    splits = choose_splits(k // RING_TILE_K, groups, limits.workgroup_target, split_limit)
    return kernel, splits, (*_grid2(groups, limits.max_groups), splits)


def _grid2(groups: int, max_groups: int) -> tuple[int, int]:
    """A grid of at least ``groups`` workgroups; the kernels skip the surplus."""
    height = -(-groups // max_groups)
    return -(-groups // height), height


def _check(plan: RingPlan, limits: PlanLimits) -> None:
    # Checked here because an invalid dispatch ends the whole process at submission.
    if max(*plan.grid, *plan.reduce_grid) > limits.max_groups:
        raise EngineError(f"a grid of {plan.grid} workgroups exceeds this adapter's {limits.max_groups}")
    if plan.kernel.workgroup_bytes > limits.workgroup_bytes:
        raise EngineError(
            f"the kernel needs {plan.kernel.workgroup_bytes} bytes of workgroup memory; "
            f"this adapter has {limits.workgroup_bytes}"
        )
