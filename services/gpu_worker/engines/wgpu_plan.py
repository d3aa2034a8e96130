"""How a product is laid out on the device: slabs, chunks, kernels, split-K. Pure arithmetic, no device.

Padded sizes: ``k`` to a multiple of 64 and ``n`` to a multiple of 128, with zeros, which add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gpu_worker.engines.base import EngineError
from gpu_worker.kernels.gemm import (
    REDUCE_THREADS,
    SKINNY_ROWS,
    TILE_K,
    TILE_N,
    GemmKernel,
    Kernel,
    SkinnyKernel,
    TiledKernel,
)

K_ALIGN = 64
N_ALIGN = 128
# Workgroups that fill a large GPU (132 multiprocessors, two workgroups each), and smaller ones.
WORKGROUP_TARGETS = {"discrete": 264, "virtual": 264, "integrated": 64, "cpu": 8}
# Wide columns read the operand less often, but leave a narrow product with few workgroups. Measured on a
# large GPU: 2560 -> 6144 wants them; 9728 -> 2560, which would then be split 26 times, does not.
_WIDE_SPLITS_MAX = 16
# A split shorter than this costs more in partial sums than it gains in parallelism.
_TILED_SPLIT_MIN_K = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What a plan must respect.

    Args:
        binding_bytes: the largest storage binding, and no more than the largest buffer.
        workgroup_bytes: workgroup memory.
        max_groups: workgroups per grid dimension.
        workgroup_target: workgroups that fill the device.
        f16: weights are stored as native f16.
    """

    binding_bytes: int
    workgroup_bytes: int
    max_groups: int
    workgroup_target: int
    f16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Columns ``[start, stop)`` of a weight, stored ``width`` columns wide (padded)."""

    start: int
    stop: int
    width: int

    @property
    def end(self) -> int:
        """First padded column after this slab."""
        return self.start + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """One product of an operand chunk and a weight slab.

    With ``splits`` > 1 the kernel leaves ``partial_bytes`` of partial sums, which a second dispatch of
    ``reduce_grid`` workgroups adds.
    """

    kernel: GemmKernel
    splits: int
    grid: tuple[int, int, int]
    reduce_grid: tuple[int, int, int]
    partial_bytes: int


def round_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def plan_slabs(k: int, n: int, limits: PlanLimits, *, item_bytes: int = 2) -> tuple[Slab, ...]:
    """Cuts a weight of padded depth ``k`` and ``n`` real columns into slabs of nearly equal width.

    ``item_bytes`` is the size of a weight's element.

    Raises:
        EngineError: even the narrowest slab exceeds the device's binding limit.
    """
    bound = min(limits.binding_bytes // (item_bytes * k), limits.max_groups * N_ALIGN)
    widest = bound // N_ALIGN * N_ALIGN
    if widest == 0:
        raise EngineError(
            f"a weight with d_in {k} needs a storage binding of {item_bytes * k * N_ALIGN} bytes; "
            f"this adapter allows {limits.binding_bytes}"
        )
    padded = round_up(n, N_ALIGN)
    count = -(-padded // widest)
    width = round_up(-(-padded // count), N_ALIGN)
    starts = range(0, padded, width)
    return tuple(
        Slab(start=start, stop=min(start + width, n), width=min(width, padded - start)) for start in starts
    )


def rows_per_chunk(k: int, n: int, chunk_bytes: int, limits: PlanLimits, *, item_bytes: int = 2) -> int:
    """How many operand rows fit one submission, given padded ``k`` and ``n``.

    ``item_bytes`` is the size of an operand's element; a result's has 4.

    Raises:
        EngineError: not even one row of operand or result fits the device's binding limit.
    """
    row_bytes = max(item_bytes * k, 4 * n)
    if row_bytes > limits.binding_bytes:
        raise EngineError(
            f"one row of the product needs a storage binding of {row_bytes} bytes; "
            f"this adapter allows {limits.binding_bytes}"
        )
    return max(1, min(chunk_bytes, limits.binding_bytes) // row_bytes)


@lru_cache(maxsize=4096)
def plan_gemm(m: int, k: int, n: int, limits: PlanLimits) -> GemmPlan:
    """The kernel, split-K and grid for ``m`` rows and a slab of padded ``k`` and ``n``.

    Raises:
        EngineError: the grid exceeds the device's limits.
    """
    partial_limit = limits.binding_bytes // (4 * m * n)
    if m <= SKINNY_ROWS[-1]:
        kernel, splits, grid = _skinny(m, k, n, limits, partial_limit)
    else:
        kernel, splits, grid = _tiled(m, k, n, limits, partial_limit)
    return complete_plan(kernel, splits, grid, m, n, limits)


def complete_plan(
    kernel: GemmKernel, splits: int, grid: tuple[int, int, int], m: int, n: int, limits: PlanLimits
) -> GemmPlan:
    """The plan with its second dispatch, checked.

    Raises:
        EngineError: it exceeds the device's limits.
    """
    plan = GemmPlan(
        kernel=kernel,
        splits=splits,
        grid=grid,
        reduce_grid=(*grid2(-(-m * n // 4 // REDUCE_THREADS), limits.max_groups), 1),
        partial_bytes=4 * splits * m * n if splits > 1 else 0,
    )
    _check(plan, limits)
    return plan


def choose_splits(units: int, groups: int, target: int, limit: int) -> int:
    """Into how many parts to split k so that ``groups`` workgroups become about ``target``.

    ``units`` is how many indivisible steps k has, ``limit`` the most splits allowed. No part is left empty,
    so the answer can be lower than ``target / groups``: 20 units in 11 parts of 2 units are 10 parts.
    """
    wanted = max(1, min(target // groups, units, limit))
    return -(-units // -(-units // wanted))


_Layout = tuple[Kernel, int, tuple[int, int, int]]


def _skinny(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    rows = next(rows for rows in SKINNY_ROWS if m <= rows)
    chunk = 128 if k % 128 == 0 else 64
    kernel = SkinnyKernel(rows=rows, columns=8, slices=4, chunk=chunk, f16=limits.f16)
    if limits.workgroup_target // -(-n // kernel.group_columns) > _WIDE_SPLITS_MAX:
        kernel = SkinnyKernel(rows=rows, columns=4, slices=8, chunk=chunk, f16=limits.f16)
    groups = -(-n // kernel.group_columns)
    splits = choose_splits(k // chunk, groups, limits.workgroup_target, partial_limit)
    return kernel, splits, (groups, splits, 1)


def _tiled(m: int, k: int, n: int, limits: PlanLimits, partial_limit: int) -> _Layout:
    kernel = TiledKernel(tile_m=128, f16=limits.f16)
    if m <= 64 or kernel.workgroup_bytes > limits.workgroup_bytes:
        kernel = TiledKernel(tile_m=64, f16=limits.f16)
    groups = -(-m // kernel.tile_m) * (n // TILE_N)
    split_limit = min(k // _TILED_SPLIT_MIN_K, partial_limit)
    splits = choose_splits(k // TILE_K, groups, limits.workgroup_target, split_limit)
    return kernel, splits, (*grid2(groups, limits.max_groups), splits)


def grid2(groups: int, max_groups: int) -> tuple[int, int]:
    """A grid of at least ``groups`` workgroups; the kernels skip the surplus."""
    height = -(-groups // max_groups)
    return -(-groups // height), height


def _check(plan: GemmPlan, limits: PlanLimits) -> None:
    # Checked here because an invalid dispatch ends the whole process at submission.
    if max(*plan.grid, *plan.reduce_grid) > limits.max_groups:
        raise EngineError(f"a grid of {plan.grid} workgroups exceeds this adapter's {limits.max_groups}")
    if plan.kernel.workgroup_bytes > limits.workgroup_bytes:
        raise EngineError(
            f"the kernel needs {plan.kernel.workgroup_bytes} bytes of workgroup memory; "
            f"this adapter has {limits.workgroup_bytes}"
        )
