"""Scales of rows, shields and operands, and the conversions of schemes that do not mix rows.

Shapes: ``rows``, ``values`` and ``out`` (n, d) f32; ``scales`` (n,) f32 powers of two; ``operand``
(n, d) float16 as uint16.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from gelo.f16 import float_to_half
from tee_runner.protection.base import OPERAND_LIMIT
from tee_runner.vector import bits_from_float

SHIELD_ENERGY = 4.0
# A shield element stays below this many standard deviations: Box–Muller on 32 bits ends at 6.7.
_TAIL = 6.8
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EXPONENT_MASK = np.uint32(0x7F800000)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _square_sum(row: Any) -> Any:
    total = _ZERO
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    return total


@numba.njit(nogil=True, cache=True)
def row_scales(rows: Any, scales: Any) -> Any:
    """Powers of two that bring each row's norm into [1, 2), and the mean norm after scaling.

    Exact in float32. Without it one row with a massive activation would push the others
    below the f16 rounding error of the mixed operand. A row that is zero, or whose norm is not
    a finite float32, gets scale 1 (and a non-finite one is caught on the way back).
    """
    total = 0.0
    for i in range(rows.shape[0]):
        norm = math.sqrt(float(_square_sum(rows[i])))
        if norm > 0.0 and norm < np.inf:
            _, exponent = math.frexp(norm)
            scale = math.ldexp(1.0, 1 - exponent)
            scales[i] = scale
            total += norm * scale
        else:
            scales[i] = _ONE
    return total / rows.shape[0]


@numba.njit(nogil=True, cache=True)
def operand_scale(n: int, k: int, sigma: float) -> float:
    """A power of two that keeps every element of A·[H; S] within :data:`OPERAND_LIMIT`.

    An element is at most the norm of its column of [H; S]. Data rows have norms below 2, so
    the column's data part is below 2·√n, and its shield part below 6.8·σ·√k: a bound that
    depends on shapes and the mean norm alone, not on which elements are large.
    """
    bound = math.sqrt(4.0 * n + k * (_TAIL * sigma) ** 2)
    return math.ldexp(1.0, math.floor(math.log2(OPERAND_LIMIT / bound)))


@numba.njit(nogil=True, cache=True)
def block_scales(rows: Any, scales: Any, k: int) -> Any:
    """:func:`row_scales`, and of a block with ``k`` shield rows: σ of these, and the operand's scale."""
    sigma = SHIELD_ENERGY * row_scales(rows, scales) / math.sqrt(rows.shape[1])
    return sigma, operand_scale(rows.shape[0], k, sigma)


@numba.njit(nogil=True, cache=True, parallel=True)
def to_half(values: Any, scales: Any, operand: Any) -> None:
    """``operand[i] = f16(values[i] · scales[i])``, row by row."""
    for i in numba.prange(values.shape[0]):
        for c in range(values.shape[1]):
            operand[i, c] = float_to_half(values[i, c] * scales[i])


@numba.njit(nogil=True, cache=True)
def to_half_serial(values: Any, scales: Any, operand: Any) -> None:
    """:func:`to_half` on the calling thread."""
    for i in range(values.shape[0]):
        for c in range(values.shape[1]):
            operand[i, c] = float_to_half(values[i, c] * scales[i])


@numba.njit(nogil=True, cache=True)
def unscale_rows(result: Any, scales: Any, inverse: Any, out: Any) -> bool:
    """``out[i] = result[i] · inverse / scales[i]``, reading each float once; True if not finite."""
    bad = np.uint32(0)
    for i in range(out.shape[0]):
        factor = inverse / scales[i]
        for c in range(out.shape[1]):
            x = result[i, c] * factor
            out[i, c] = x
            bad |= np.uint32((bits_from_float(x) & _EXPONENT_MASK) == _EXPONENT_MASK)
    return bad != 0
