"""Products modulo 2^32 on AMX tiles; see :mod:`gpu_worker.engines.ring_kernels` for the byte planes.

TDPBUSD multiplies 16 rows of unsigned bytes by 16 columns of signed ones, 64 input indices at a
time, and adds to 32-bit sums without saturation: exact modulo 2^32. The rows of a tile, a
*block*, are the four planes of up to four operand rows; the planes' sums are combined when a
block is done. One decode step costs little more than reading its weights, one byte each.

Four accumulators are in use whatever the rows, so that a product need not wait for the one
before it: 1 block by 4 panels, or 2 by 2. More than 8 rows go 2 by 2, some steps at a time.

Nothing in here is compiled before :func:`kernel` is called, so that the module imports anywhere.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu_worker.engines import amx
from gpu_worker.engines.amx_tiles import (
    TILE_BYTES,
    accumulators,
    configure_tiles,
    release_tiles,
    tile_scratch,
    zero_accumulators,
)
from gpu_worker.engines.microkernel import LANES
from gpu_worker.engines.ring_kernels import (
    BLOCK_ROWS,
    BLOCK_STRIDE,
    COLUMNS,
    OUT,
    OUT_STRIDE,
    PANEL_STRIDE,
    PANELS,
    PLANES,
    ROWS,
    SOURCE,
    STEP_STRIDE,
    STEPS,
    WEIGHT,
    WEIGHT_PREFETCH_BYTES,
    combine_planes,
    compile_chunk,
    job_word,
    prefetch,
)

_FULL_ROWS = 4  # operand rows of a full block
# Steps in which two panels of weights stay in the first-level cache while more rows use them, and
# rows whose part of those steps stays in the second-level cache while more panels use it.
_KEPT_STEPS = 16
_KEPT_ROWS = 256

# Tiles 0 to 3 accumulate, the others hold parts of the operand and of weights.
_A, _W = (4, 5), (6, 7)
_SCRATCH_STRIDE = 4 * LANES * 4

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_PTR = ir.PointerType()


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _step_kernel(blocks: int, panels: int) -> Any:
    """One step's products of ``blocks`` by ``panels`` tiles, added to accumulator ``panels·block + panel``.

    Arguments: the weights' address, the bytes from panel to panel, the prefetch distance, the
    operand's address and the bytes from block to block.
    """

    @intrinsic
    def step(
        typing_context: Any, weight: Any, panel_stride: Any, ahead: Any, operand: Any, block_stride: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, panel_stride, ahead, operand, block_stride = arguments

            def load(tile: int, base: Any, stride: Any, index: int) -> Any:
                address = builder.add(base, builder.mul(stride, _I64(index)))
                _call(builder, "llvm.x86.tileloadd64", [_I8(tile), builder.inttoptr(address, _PTR), _I64(64)])
                return address

            for panel in range(panels):
                place = load(_W[panel % 2], weight, panel_stride, panel)
                for offset in range(0, TILE_BYTES, 64):
                    prefetch(builder, builder.add(place, ahead), offset)
                for block in range(blocks):
                    if panel == 0:
                        load(_A[block % 2], operand, block_stride, block)
                    tiles = [_I8(panels * block + panel), _I8(_A[block % 2]), _I8(_W[panel % 2])]
                    _call(builder, "llvm.x86.tdpbusd", tiles)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return step


_step_1x4, _step_2x2 = _step_kernel(1, 4), _step_kernel(2, 2)
_store_4 = accumulators("tilestored64", range(4), 0)


@numba.njit(nogil=True, cache=True)
def _write_out(
    scratch: int, blocks: int, block_rows: int, rows: int, out: int, out_stride: int, columns: int,
    accumulate: bool,
) -> None:  # fmt: skip
    """The accumulators, ``blocks`` by ``4 / blocks`` panels, to ``rows`` rows at ``out``."""
    _store_4(scratch, _SCRATCH_STRIDE)
    panels = PANELS // blocks
    for row in range(rows):
        block = row // block_rows
        for panel in range(panels):
            tile = scratch + (panels * block + panel) * LANES * 4
            combine_planes(
                tile + row % block_rows * PLANES * _SCRATCH_STRIDE, _SCRATCH_STRIDE,
                out + row * out_stride + panel * LANES * 4, columns - panel * LANES, accumulate,
            )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _one_pass(
    blocks: int, steps: int, step_stride: int, block_stride: int, operand: int, weight: int,
    panel_stride: int,
) -> None:  # fmt: skip
    """All rows at once: each weight is read once."""
    zero_accumulators()
    # At the end of these panels, prefetch the next ones, which lie behind all of them.
    behind = (PANELS // blocks - 1) * panel_stride
    for step in range(steps):
        w = weight + step * TILE_BYTES
        a = operand + step * step_stride
        ahead = WEIGHT_PREFETCH_BYTES
        if step * TILE_BYTES + ahead >= panel_stride:
            ahead += behind
        if blocks == 1:
            _step_1x4(w, panel_stride, ahead, a, block_stride)
        else:
            _step_2x2(w, panel_stride, ahead, a, block_stride)


@numba.njit(nogil=True, cache=True)
def _many_rows(
    base: int, weight: int, out: int, columns: int, panels: int, first_row: int, rows: int, scratch: int
) -> None:
    """``rows`` rows from ``first_row`` on, the first of a pair of blocks."""
    operand, step_stride = job_word(base, SOURCE), job_word(base, STEP_STRIDE)
    block_stride, block_rows = job_word(base, BLOCK_STRIDE), job_word(base, BLOCK_ROWS)
    panel_stride, out_stride = job_word(base, PANEL_STRIDE), job_word(base, OUT_STRIDE)
    steps = job_word(base, STEPS)
    pair = 2 * block_rows
    for first in range(0, steps, _KEPT_STEPS):
        last = min(first + _KEPT_STEPS, steps)
        for panel in range(0, panels, 2):
            w = weight + panel * panel_stride
            for row in range(first_row, first_row + rows, pair):
                a = operand + row // block_rows * block_stride
                ahead = WEIGHT_PREFETCH_BYTES if row == first_row else 0
                zero_accumulators()
                for step in range(first, last):
                    _step_2x2(
                        w + step * TILE_BYTES, panel_stride, ahead, a + step * step_stride, block_stride
                    )
                count = min(pair, first_row + rows - row)
                place = out + row * out_stride + panel * LANES * 4
                _write_out(
                    scratch, 2, block_rows, count, place, out_stride, columns - panel * LANES, first > 0
                )


def _chunk(base: int, first: int, count: int) -> None:
    """``count`` panels from ``first`` on, both multiples of 4, of the job of the team at ``base``."""
    panel_stride, out_stride = job_word(base, PANEL_STRIDE), job_word(base, OUT_STRIDE)
    rows, block_rows = job_word(base, ROWS), job_word(base, BLOCK_ROWS)
    scratch = tile_scratch()
    configure_tiles(block_rows * PLANES, 0)
    blocks, _ = blocks_needed(rows)
    if blocks <= 2:
        wide = PANELS // blocks
        for panel in range(first, first + count, wide):
            weight = job_word(base, WEIGHT) + panel * panel_stride
            _one_pass(
                blocks, job_word(base, STEPS), job_word(base, STEP_STRIDE), job_word(base, BLOCK_STRIDE),
                job_word(base, SOURCE), weight, panel_stride,
            )  # fmt: skip
            place = job_word(base, OUT) + panel * LANES * 4
            _write_out(
                scratch, blocks, block_rows, rows, place, out_stride,
                job_word(base, COLUMNS) - panel * LANES, False,
            )  # fmt: skip
    else:
        pair = 2 * block_rows
        kept = _KEPT_ROWS // pair * pair
        weight = job_word(base, WEIGHT) + first * panel_stride
        out = job_word(base, OUT) + first * LANES * 4
        columns = job_word(base, COLUMNS) - first * LANES
        for row in range(0, rows, kept):
            _many_rows(base, weight, out, columns, count, row, min(kept, rows - row), scratch)
    release_tiles()


@numba.njit(nogil=True, cache=True)
def blocks_needed(rows: int) -> Any:
    """One block or pairs of blocks to lay ``rows`` operand rows out in, and the operand rows of each."""
    blocks = 1 if rows <= _FULL_ROWS else (rows + 2 * _FULL_ROWS - 1) // (2 * _FULL_ROWS) * 2
    return blocks, (rows + blocks - 1) // blocks


def unavailable() -> str:
    """Why this process cannot use AMX on bytes; empty if it can, after asking the kernel's permission."""
    if reason := amx.unavailable():
        return reason
    return "" if "amx-int8" in amx.target_features() else "the processor lacks amx-int8"


@lru_cache(maxsize=1)
def kernel() -> Any:
    """The compiled function for a chunk; only where available."""
    return compile_chunk(_chunk)
