"""Apply and unapply: one pass over column tiles that stay in cache.

A tile holds all s rows of a few columns. It is filled with the scaled data rows and fresh
shield rows, transformed in place, and converted to f16 on its way into the operand
buffer. The way back reads each float of the result exactly once (the buffer may be memory
that the worker can still change), transforms, and writes the data rows only.

Shapes: ``rows`` (n, d) f32; ``scales`` (n,) f32 powers of two; ``normals``
(shield_size,) f32 standard normal; ``operand`` (s, d) float16 as uint16; ``result`` (s, d) f32; s = n + k.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from gelo.f16 import float_to_half
from tee_runner.vector import bits_from_float, matmul_add, walsh_hadamard

# Floats of a tile: 64 Ki, 256 KiB, an eighth of the L2 of current server cores.
TILE_FLOATS = 1 << 16
_MIN_WIDTH, _MAX_WIDTH = 16, 64
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EXPONENT_MASK = np.uint32(0x7F800000)


@numba.njit(nogil=True, cache=True)
def tile_width(s: int) -> int:
    """Columns of a tile of ``s`` rows: a multiple of 16."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, TILE_FLOATS // s // 16 * 16))


@numba.njit(nogil=True, cache=True)
def shield_size(n: int, s: int, d: int) -> int:
    """Normals one apply consumes: one per shield element of every whole tile."""
    width = tile_width(s)
    return -(-d // width) * (s - n) * width


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
def _fill(
    tile: Any, rows: Any, scales: Any, normals: Any, sigma: Any, first: int, width: int, used: int
) -> None:
    """Load one tile: data rows, then fresh shield rows. Data columns from ``used`` on are zero."""
    n = rows.shape[0]
    for i in range(n):
        scale = scales[i]
        base = i * width
        for c in range(used):
            tile[base + c] = rows[i, first + c] * scale
        for c in range(used, width):
            tile[base + c] = _ZERO
    shield = tile[n * width :]
    start = first * (tile.shape[0] // width - n)
    for c in range(shield.shape[0]):
        shield[c] = normals[start + c] * sigma


@numba.njit(nogil=True, cache=True)
def _sign_rows(tile: Any, signs: Any, width: int) -> None:
    for i in range(signs.shape[0]):
        sign = signs[i]
        base = i * width
        for c in range(width):
            tile[base + c] *= sign


@numba.njit(nogil=True, cache=True)
def _store_half(tile: Any, operand: Any, scale: Any, first: int, width: int, used: int) -> None:
    for i in range(operand.shape[0]):
        base = i * width
        for c in range(used):
            operand[i, first + c] = float_to_half(tile[base + c] * scale)


@numba.njit(nogil=True, cache=True)
def _store_rows(tile: Any, out: Any, scales: Any, inverse: Any, first: int, width: int, used: int) -> bool:
    """Write the data rows; returns whether one of their values is not finite."""
    bad = np.uint32(0)
    for i in range(out.shape[0]):
        base = i * width
        factor = inverse / scales[i]
        for c in range(used):
            x = tile[base + c] * factor
            out[i, first + c] = x
            bad |= np.uint32((bits_from_float(x) & _EXPONENT_MASK) == _EXPONENT_MASK)
    return bad != 0


@numba.njit(nogil=True, cache=True)
def _hd3_apply_tile(
    tile: Any, rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, scale: Any,
    operand: Any, first: int, width: int,
) -> None:  # fmt: skip
    s, d = operand.shape
    used = min(width, d - first)
    _fill(tile, rows, scales, normals, sigma, first, width, used)
    for stage in range(3):
        walsh_hadamard(tile.ctypes.data, s, width)
        _sign_rows(tile, signs[stage], width)
    _store_half(tile, operand, scale, first, width, used)


@numba.njit(nogil=True, cache=True)
def _hd3_unapply_tile(
    tile: Any, result: Any, signs: Any, scales: Any, inverse: Any, out: Any, first: int, width: int
) -> bool:
    s, d = result.shape
    used = min(width, d - first)
    for i in range(s):
        base = i * width
        sign = signs[2, i]
        for c in range(used):
            tile[base + c] = result[i, first + c] * sign
        for c in range(used, width):
            tile[base + c] = _ZERO
    walsh_hadamard(tile.ctypes.data, s, width)
    _sign_rows(tile, signs[1], width)
    walsh_hadamard(tile.ctypes.data, s, width)
    _sign_rows(tile, signs[0], width)
    walsh_hadamard(tile.ctypes.data, s, width)
    return _store_rows(tile, out, scales, inverse, first, width, used)


@numba.njit(nogil=True, cache=True)
def hd3_apply(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """``operand = f16(scale · D₃H D₂H D₁H · [rows·scales; σ·Gaussian])``, H unnormalised.

    ``signs`` (3, s) holds the diagonals of D₁, D₂, D₃; s is a power of two.
    """
    s, d = operand.shape
    width = tile_width(s)
    for first in range(0, d, width):
        _hd3_apply_tile(
            scratch[: s * width], rows, scales, normals, sigma, signs, scale, operand, first, width
        )


@numba.njit(nogil=True, cache=True, parallel=True)
def hd3_apply_parallel(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """:func:`hd3_apply` on all threads."""
    s, d = operand.shape
    width = tile_width(s)
    for t in numba.prange(-(-d // width)):
        own = np.empty(s * width, np.float32)
        _hd3_apply_tile(own, rows, scales, normals, sigma, signs, scale, operand, t * width, width)


@numba.njit(nogil=True, cache=True)
def hd3_unapply(result: Any, signs: Any, scales: Any, inverse: Any, out: Any, scratch: Any) -> bool:
    """The first n rows of the inverse transform, unscaled; True if any is not finite."""
    s, d = result.shape
    width = tile_width(s)
    bad = False
    for first in range(0, d, width):
        bad |= _hd3_unapply_tile(scratch[: s * width], result, signs, scales, inverse, out, first, width)
    return bad


@numba.njit(nogil=True, cache=True, parallel=True)
def hd3_unapply_parallel(result: Any, signs: Any, scales: Any, inverse: Any, out: Any, scratch: Any) -> bool:
    """:func:`hd3_unapply` on all threads."""
    s, d = result.shape
    width = tile_width(s)
    tiles = -(-d // width)
    bad = np.zeros(tiles, np.uint8)
    for t in numba.prange(tiles):
        own = np.empty(s * width, np.float32)
        bad[t] = _hd3_unapply_tile(own, result, signs, scales, inverse, out, t * width, width)
    return bool(bad.any())


@numba.njit(nogil=True, cache=True)
def _dense_apply_tile(
    tile: Any, mixed: Any, rows: Any, scales: Any, normals: Any, sigma: Any, mask: Any, scale: Any,
    operand: Any, first: int, width: int,
) -> None:  # fmt: skip
    s, d = operand.shape
    used = min(width, d - first)
    _fill(tile, rows, scales, normals, sigma, first, width, used)
    mixed[:] = _ZERO
    matmul_add(
        mask.ctypes.data, s, tile.ctypes.data, width, mixed.ctypes.data, width, mask.shape[0], s, width
    )
    _store_half(mixed, operand, scale, first, width, used)


@numba.njit(nogil=True, cache=True)
def dense_apply(
    rows: Any, scales: Any, normals: Any, sigma: Any, mask: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """``operand = f16(scale · mask · [rows·scales; σ·Gaussian])``.

    ``mask`` ``(⌈s/4⌉·4, s)`` f32, zero rows below s.
    """
    s, d = operand.shape
    width = tile_width(s)
    size = mask.shape[0] * width
    for first in range(0, d, width):
        _dense_apply_tile(
            scratch[: s * width], scratch[size : 2 * size], rows, scales, normals, sigma, mask, scale,
            operand, first, width,
        )  # fmt: skip


@numba.njit(nogil=True, cache=True, parallel=True)
def dense_apply_parallel(
    rows: Any, scales: Any, normals: Any, sigma: Any, mask: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """:func:`dense_apply` on all threads."""
    s, d = operand.shape
    width = tile_width(s)
    for t in numba.prange(-(-d // width)):
        tile = np.empty(s * width, np.float32)
        mixed = np.empty(mask.shape[0] * width, np.float32)
        _dense_apply_tile(tile, mixed, rows, scales, normals, sigma, mask, scale, operand, t * width, width)


@numba.njit(nogil=True, cache=True)
def _dense_unapply_tile(
    tile: Any, mixed: Any, result: Any, inverse_mask: Any, scales: Any, inverse: Any, out: Any,
    first: int, width: int,
) -> bool:  # fmt: skip
    s, d = result.shape
    used = min(width, d - first)
    for i in range(s):
        base = i * width
        for c in range(used):
            tile[base + c] = result[i, first + c]
        for c in range(used, width):
            tile[base + c] = _ZERO
    mixed[:] = _ZERO
    matmul_add(
        inverse_mask.ctypes.data, s, tile.ctypes.data, width, mixed.ctypes.data, width,
        inverse_mask.shape[0], s, width,
    )  # fmt: skip
    return _store_rows(mixed, out, scales, inverse, first, width, used)


@numba.njit(nogil=True, cache=True)
def dense_unapply(result: Any, inverse_mask: Any, scales: Any, inverse: Any, out: Any, scratch: Any) -> bool:
    """``out = (inverse_mask · result)[:n] · inverse / scales``; True if a value is not finite.

    ``inverse_mask`` ``(⌈n/4⌉·4, s)`` f32: the first n rows of A's inverse, zero rows below.
    """
    s, d = result.shape
    width = tile_width(s)
    start = s * width
    size = inverse_mask.shape[0] * width
    bad = False
    for first in range(0, d, width):
        bad |= _dense_unapply_tile(
            scratch[:start], scratch[start : start + size], result, inverse_mask, scales, inverse, out,
            first, width,
        )  # fmt: skip
    return bad


@numba.njit(nogil=True, cache=True, parallel=True)
def dense_unapply_parallel(
    result: Any, inverse_mask: Any, scales: Any, inverse: Any, out: Any, scratch: Any
) -> bool:
    """:func:`dense_unapply` on all threads."""
    s, d = result.shape
    width = tile_width(s)
    tiles = -(-d // width)
    bad = np.zeros(tiles, np.uint8)
    for t in numba.prange(tiles):
        tile = np.empty(s * width, np.float32)
        mixed = np.empty(inverse_mask.shape[0] * width, np.float32)
        bad[t] = _dense_unapply_tile(
            tile, mixed, result, inverse_mask, scales, inverse, out, t * width, width
        )
    return bool(bad.any())


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
