"""Products on AMX tiles: bf16 dot products that are exact for f16 factors.

A finite f16 value has 11 significant bits and is the exact sum of two bf16 values of 8: ``hi``,
its f32 bits cut to the upper half, and ``lo``, the rest (at most 3 significant bits). So
``a·w = ahi·whi + alo·whi + ahi·wlo + alo·wlo``, four tile products in f32, nothing dropped: only
the f32 additions round, as in any other kernel. AMX flushes bf16 and f32 denormals. None
occurs: every nonzero part is a multiple of 2^-24 and every nonzero product one of 2^-48.
An infinity has no such parts; the engine leaves those operands and weights to the vector kernel.

Memory holds the weights as the vector kernel has them, panels ``[k][16 columns]`` of f16, and
each thread widens what it multiplies into tiles ``[k / 2][16 columns][2]`` of bf16, one for hi
and one for lo, in its first-level cache. A decode step then costs little more than reading its
weights. Weights whose lo parts are all zero (bf16 checkpoints) need two products instead of four.

Nothing in here is compiled before :func:`kernels` is called, so that the module imports anywhere.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.registry import cpu_target

from gelo.atomics import atomic_load
from gelo.f16 import half_to_float
from gpu_worker.engines.amx_tiles import (
    BLOCK_STEPS,
    PANELS,
    SCRATCH_BYTES,
    SLOT_BYTES,
    STEP,
    TALL_SLOT_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    accumulators,
    configure_tiles,
    copy_past,
    float_bits,
    release_tiles,
    settle,
    split_halves,
    step_kernel,
    tile_scratch,
    zero_accumulators,
)
from gpu_worker.engines.microkernel import (
    DEPTH,
    LANES,
    OPERAND,
    OPERAND_STRIDE,
    OUT,
    OUT_STRIDE,
    ROWS,
    WEIGHT,
)

# Bytes ahead, in each panel, that are prefetched.
_PREFETCH_BYTES = 2048

_WIDEN, _MULTIPLY, _BOTH = range(3)
_widen_2, _widen_1 = step_kernel(False, 2, True, False), step_kernel(False, 1, True, False)
_multiply_2, _multiply_1 = step_kernel(False, 2, False, True), step_kernel(False, 1, False, True)
_both_2, _both_1 = step_kernel(False, 2, True, True), step_kernel(False, 1, True, True)
_tall_widen_2, _tall_widen_1 = step_kernel(True, 2, True, False), step_kernel(True, 1, True, False)
_tall_multiply_2, _tall_multiply_1 = step_kernel(True, 2, False, True), step_kernel(True, 1, False, True)
_tall_both_2, _tall_both_1 = step_kernel(True, 2, True, True), step_kernel(True, 1, True, True)
_store_4 = accumulators("tilestored64", range(4), 0)
_load_upper, _load_lower = (accumulators("tileloadd64", range(2), first) for first in (0, 2))
_store_upper, _store_lower = (accumulators("tilestored64", range(2), first) for first in (0, 2))


@numba.njit(nogil=True, cache=True)
def _advance(
    what: int, tall: bool, planes: int, weight: int, panel_stride: int, ahead: int, target: int,
    tiles: int, operand: int, part: int, tile_row: int,
) -> None:  # fmt: skip
    """One step of the wanted kind; see :func:`step_kernel`."""
    if not tall and planes == 2:
        if what == _BOTH:
            _both_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        elif what == _WIDEN:
            _widen_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        else:
            _multiply_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
    elif not tall:
        if what == _BOTH:
            _both_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        elif what == _WIDEN:
            _widen_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        else:
            _multiply_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
    elif planes == 2:
        if what == _BOTH:
            _tall_both_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        elif what == _WIDEN:
            _tall_widen_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
        else:
            _tall_multiply_2(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
    elif what == _BOTH:
        _tall_both_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
    elif what == _WIDEN:
        _tall_widen_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)
    else:
        _tall_multiply_1(weight, panel_stride, ahead, target, tiles, operand, part, tile_row)


@numba.njit(nogil=True, cache=True)
def _one_pass(
    tall: bool, planes: int, operand: int, part: int, steps: int, weight: int, panel_stride: int,
    scratch: int, out: int, out_stride: int, past: bool,
) -> None:  # fmt: skip
    """All rows at once: each weight is widened one step before it is used, and used once.

    ``past``: write results of up to 16 rows past the caches. The reader is another process, so their
    lines are in its processor's caches, and fetching each of them only to overwrite it took 0.9 ms of a
    decode step's 24 (16 rows, two cores).
    """
    tile_row = steps * 2 * part
    behind = (1 if tall else 3) * panel_stride
    zero_accumulators()
    _advance(_WIDEN, tall, planes, weight, panel_stride, _PREFETCH_BYTES, scratch, 0, 0, 0, 0)
    for step in range(steps - 1):
        following = weight + (step + 1) * TILE_BYTES
        tiles = scratch + (step & 1) * SLOT_BYTES
        # At the end of these panels, prefetch the next ones, which lie behind all of them.
        skip = behind if (step + 1) * TILE_BYTES + _PREFETCH_BYTES >= panel_stride else 0
        _advance(
            _BOTH, tall, planes, following, panel_stride, _PREFETCH_BYTES + skip,
            scratch + (~step & 1) * SLOT_BYTES, tiles, operand + step * 2 * part, part, tile_row,
        )  # fmt: skip
    tiles = scratch + (~steps & 1) * SLOT_BYTES
    _advance(_MULTIPLY, tall, planes, 0, 0, 0, 0, tiles, operand + (steps - 1) * 2 * part, part, tile_row)
    if tall:
        _store_upper(out, out_stride)
        _store_lower(out + part // 64 * out_stride, out_stride)
    elif past:
        mixed = scratch + SCRATCH_BYTES
        _store_4(mixed, PANELS * LANES * 4)
        for row in range(part // 64):
            copy_past(mixed + row * PANELS * LANES * 4, out + row * out_stride)
    else:
        _store_4(out, out_stride)


@numba.njit(nogil=True, cache=True)
def _many_rows(
    planes: int, operand: int, part: int, steps: int, weight: int, panel_stride: int, scratch: int,
    out: int, out_stride: int, rows: int,
) -> None:  # fmt: skip
    """More than 32 rows: some steps of two panels are widened with the first rows that use them."""
    height = part // 64
    tile_row = steps * 2 * part
    for first in range(0, steps, BLOCK_STEPS):
        count = min(BLOCK_STEPS, steps - first)
        source = weight + first * TILE_BYTES
        _advance(_WIDEN, True, planes, source, panel_stride, _PREFETCH_BYTES, scratch, 0, 0, 0, 0)
        for row in range(0, rows, 2 * height):
            # The last rows may fill one half only: then the other half is one row of no meaning.
            more = min(height, rows - row - height)
            if row + 2 * height > rows:
                configure_tiles(min(height, rows - row), max(more, 1))
            upper = out + row * out_stride
            lower = upper + height * out_stride if more > 0 else scratch + SCRATCH_BYTES
            if first:
                _load_upper(upper, out_stride)
                _load_lower(lower, out_stride)
            else:
                zero_accumulators()
            tiles = operand + row // height * tile_row + first * 2 * part
            for step in range(count):
                _advance(
                    _BOTH if row == 0 and step + 1 < count else _MULTIPLY, True, planes,
                    source + (step + 1) * TILE_BYTES, panel_stride, _PREFETCH_BYTES,
                    scratch + (step + 1) * TALL_SLOT_BYTES, scratch + step * TALL_SLOT_BYTES,
                    tiles + step * 2 * part, part, tile_row,
                )  # fmt: skip
            _store_upper(upper, out_stride)
            _store_lower(lower, out_stride)
        if rows % (2 * height):
            configure_tiles(height, height)


@numba.njit(nogil=True, cache=True)
def _chunk(base: int, first: int, count: int, planes: int) -> None:
    """``count`` panels from ``first`` on of the job at ``base``; ``OPERAND_STRIDE`` is a tile's bytes."""
    operand = atomic_load(base + 8 * OPERAND)
    part = atomic_load(base + 8 * OPERAND_STRIDE)
    weight = atomic_load(base + 8 * WEIGHT)
    depth = atomic_load(base + 8 * DEPTH)
    out = atomic_load(base + 8 * OUT)
    out_stride = atomic_load(base + 8 * OUT_STRIDE)
    rows = atomic_load(base + 8 * ROWS)
    panel_stride = depth * 2 * LANES
    steps = depth // STEP
    height = part // 64
    tall = rows > height
    scratch = tile_scratch()
    past = not tall and (out | out_stride) % 64 == 0
    configure_tiles(height, min(height, rows - height))
    for panel in range(first, first + count, 2 if tall else PANELS):
        w = weight + panel * panel_stride
        o = out + panel * LANES * 4
        if rows <= 2 * height:
            _one_pass(tall, planes, operand, part, steps, w, panel_stride, scratch, o, out_stride, past)
        else:
            _many_rows(planes, operand, part, steps, w, panel_stride, scratch, o, out_stride, rows)
    release_tiles()
    if past:
        settle()


def _exact(base: int, first: int, count: int) -> None:
    _chunk(base, first, count, 2)


def _hi_only(base: int, first: int, count: int) -> None:
    _chunk(base, first, count, 1)


@numba.njit(nogil=True, cache=True)
def split_operand(operand: Any, tiles: Any) -> bool:
    """f16 bits ``(m, depth)``, C-contiguous, to bf16 bits ``(blocks, steps, 2, height, 32)``, hi then lo.

    Rows beyond m are left as they are. Returns False when a value is not finite.
    """
    rows, depth = operand.shape
    height = tiles.shape[3]
    special = 0
    rest = np.zeros(STEP, dtype=np.uint16)
    for row in range(rows):
        source = operand.ctypes.data + row * depth * 2
        high = tiles[row // height, 0, 0, row % height].ctypes.data
        for step in range(depth // STEP):
            place = high + step * height * 128
            special |= split_halves(source + step * 2 * STEP, place, place + height * 64)
        if depth % STEP:
            start = depth - depth % STEP
            rest[: depth - start] = operand[row, start:]
            place = high + start // STEP * height * 128
            special |= split_halves(rest.ctypes.data, place, place + height * 64)
    return special == 0


@numba.njit(nogil=True, cache=True)
def planes_needed(weight: Any) -> int:
    """For f16 bits, any shape flattened: 1 if every lo part is zero, else 2; 0 if not all are finite."""
    low = np.uint32(0)
    worst = 0
    for bits in weight:
        worst = max(worst, bits & 0x7C00)
        low |= float_bits(half_to_float(bits)) & np.uint32(0xFFFF)
    if worst == 0x7C00:
        return 0
    return 2 if low else 1


@numba.njit(nogil=True, cache=True)
def tiles_shape(rows: int, depth: int) -> Any:
    """The shape of the split operand, see :func:`split_operand`: blocks of equal height, at most 16.

    More than one block: an even number, they are multiplied in pairs.
    """
    blocks = 1 if rows <= TILE_ROWS else (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS) * 2
    return blocks, (depth + STEP - 1) // STEP, 2, (rows + blocks - 1) // blocks, STEP


def target_features() -> frozenset[str]:
    """What the compiler may use: the processor's features as numba's target has them."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@lru_cache(maxsize=1)
def unavailable() -> str:
    """Why this process cannot use AMX; empty if it can, after asking the kernel's permission."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "not Linux on x86-64"
    if missing := {"amx-tile", "amx-bf16", "avx512f"} - target_features():
        return f"the processor or numba's target lacks {', '.join(sorted(missing))}"
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): for all threads of the process.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18)):
        return f"the kernel refused it, errno {ctypes.get_errno()}"
    return ""


@lru_cache(maxsize=1)
def kernels() -> dict[int, Any]:
    """By the number of weight planes, the compiled function for a chunk; only where available."""
    signature = types.void(types.int64, types.int64, types.int64)
    return {
        planes: numba.cfunc(signature, nopython=True, cache=True)(function)
        for planes, function in ((2, _exact), (1, _hi_only))
    }


def kernel_addresses() -> dict[int, int]:
    """:func:`kernels` as addresses, good for the life of the process."""
    return {planes: int(kernel.address) for planes, kernel in kernels().items()}
