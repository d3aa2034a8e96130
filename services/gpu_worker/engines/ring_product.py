"""One product modulo 2^32 on a team, in compiled code: the operand's copy, then the chunks.

Like the team's own ``lead`` it can be called from a compiled loop.
"""

from __future__ import annotations

from typing import Any

import numba

from gpu_worker.engines.ring_amx import blocks_needed
from gpu_worker.engines.ring_kernels import (
    BLOCK_ROWS,
    BLOCK_STRIDE,
    COLUMNS,
    OUT,
    OUT_STRIDE,
    PANEL_STRIDE,
    PLANES,
    ROW_BYTES,
    ROWS,
    SOURCE,
    STEP,
    STEP_BYTES,
    STEP_STRIDE,
    STEPS,
    WEIGHT,
    copy_rows,
    split_rows,
)
from gpu_worker.engines.team import lead

# Kinds of kernel: AMX tiles, byte dot products, 32-bit words.
AMX, DOTS, WORDS = range(3)
# Rows for which another kernel may be the better one. Cold weights 576 -> 3072 on one 2.6 GHz Xeon core, in
# multiples of the time to read the weights (AMX / dots): 1 row 1.34/1.19, 2 rows 1.35/1.23, 4 rows 1.38/1.52.
FEW_ROWS = 2


@numba.njit(nogil=True, cache=True)
def scratch_bytes(kind: int, rows: int, steps: int) -> int:
    """Bytes that :func:`multiply` needs for its copy of the operand; ``steps`` are a panel's."""
    if kind == AMX:
        blocks, block_rows = blocks_needed(rows)
        rows = blocks * block_rows
    return rows * steps * STEP * 4


@numba.njit(nogil=True, cache=True)
def multiply(
    kernels: Any, weight: int, panels: int, steps: int, parts: int, operand: Any, out: int, columns: int,
    scratch: int, product: Any, job: Any, base: int,
) -> None:  # fmt: skip
    """``operand`` ``(m, d_in)`` uint32, C-contiguous, times a packed weight, to ``(m, columns)`` at ``out``.

    Args:
        kernels: ``(2, 2)`` int64, kind and address of the kernel for ``FEW_ROWS`` and for more.
        weight: address of the panels, each of ``steps`` steps in ``parts`` equal parts, the second
            for the operand's own words and the first, if there are two, for 256 times them.
        operand: may be memory that others write; each word is read once.
        scratch: address of :func:`scratch_bytes` bytes, for the kind that needs more.
        product: int64 array of ``JOB_WORDS``.
        job: the team's job, at address ``base``.
    """
    rows = operand.shape[0]
    chosen = 0 if rows <= FEW_ROWS else 1
    kind, kernel = kernels[chosen, 0], kernels[chosen, 1]
    row_bytes, step_stride, block_stride, block_rows = steps * STEP, STEP, 0, rows
    if kind == AMX:
        _, block_rows = blocks_needed(rows)
        row_bytes, step_stride = STEP, block_rows * PLANES * STEP
        block_stride = steps * step_stride
    elif kind == WORDS:
        row_bytes, step_stride = steps * STEP * 4, STEP * 4
    for part in range(parts):
        target = scratch + part * (steps // parts) * step_stride
        shift = 8 * (parts - 1 - part)
        if kind == WORDS:
            copy_rows(operand, shift, target, row_bytes)
        else:
            split_rows(operand, shift, target, row_bytes, step_stride, block_stride, block_rows)
    product[SOURCE] = scratch
    product[ROW_BYTES] = row_bytes
    product[STEP_STRIDE] = step_stride
    product[BLOCK_STRIDE] = block_stride
    product[BLOCK_ROWS] = block_rows
    product[WEIGHT] = weight
    product[PANEL_STRIDE] = steps * STEP_BYTES
    product[STEPS] = steps
    product[OUT] = out
    product[OUT_STRIDE] = 4 * columns
    product[ROWS] = rows
    product[COLUMNS] = columns
    lead(job, base, product.ctypes.data, 0, 0, steps * STEP, 0, 0, rows, panels, kernel)
