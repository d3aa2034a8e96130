"""The cascade D₃·C·D₂·C·D₁·C, C the orthonormal DCT-IV, on column tiles.

How C becomes Fourier transforms is told in :mod:`tee_runner.protection.gelo.dct4_plan`.

Shapes as in :mod:`tee_runner.protection.gelo.tiles`; ``signs`` (3, s) f32 and ``twists``
(2, s/2, 4) or (2, s, 2) f32 are the secret, ``public`` comes from ``public_plan``.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.gelo.fourier import space_floats, transform, turn_pair16, turn_rows
from tee_runner.protection.gelo.tiles import (
    LANES,
    LINE,
    apply_sources,
    copy_tail,
    finite,
    load_tile,
    piece_size,
    require_dense_rows,
    row_factors,
    store_halves,
    store_rows,
    tail_sources,
    tile_width,
    unapply_sources,
)
from tee_runner.simd import Emitter, emitted


def _turn_mirrored(e: Emitter, near: Any, far: Any, plane: Any, turn: Any, target: Any) -> None:
    """target = α·near + ᾱ·far, complex."""
    builder = e.builder
    nr, ni = e.load(near), e.load(builder.add(near, plane))
    fr, fi = e.load(far), e.load(builder.add(far, plane))
    a, b = e.spread(turn), e.spread(e.offset(turn, 1, 4))
    re = e.fma(builder.fadd(nr, fr), a, builder.fmul(builder.fsub(fi, ni), b))
    im = e.fma(builder.fadd(ni, fi), a, builder.fmul(builder.fsub(nr, fr), b))
    e.store(re, target)
    e.store(im, builder.add(target, plane))


_turn_mirrored16 = emitted(5, _turn_mirrored)


@numba.njit(nogil=True, cache=True)
def _smooth(s: int) -> bool:
    """Whether s has no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while s % prime == 0:
            s //= prime
    return s == 1


@numba.njit(nogil=True, cache=True)
def dct4_width(s: int) -> int:
    """Columns of a tile; two tiles share the cache, and odd s takes columns in pairs of vectors.

    With a large prime factor a complex row has 64 floats at most, one panel of its product.
    """
    width = tile_width(2 * s)
    if s % 2:
        return max(2 * LANES, width // (2 * LANES) * 2 * LANES)
    return width if _smooth(s) else min(width, 2 * LANES)


@numba.njit(nogil=True, cache=True)
def dct4_floats(s: int, passes: Any) -> int:
    """Size of the two tiles and the transform's working memory."""
    width = dct4_width(s)
    return 2 * s * width + space_floats(passes, width)


@numba.njit(nogil=True, cache=True)
def _pairs(source: Any, target: Any, width: int, matrices: Any, enters: bool) -> None:
    """Even s: a 2×2 matrix between rows 2k and s-1-2k and complex row k, in or out."""
    count = matrices.shape[0]
    row = width * 4
    for k in range(count):
        pair, mirror = 2 * k * row, (2 * count - 1 - 2 * k) * row
        at, to = source.ctypes.data + pair, target.ctypes.data + pair
        across = mirror - pair if enters else row
        second = to + row if enters else target.ctypes.data + mirror
        matrix = matrices.ctypes.data + k * 16
        for c in range(0, row, LINE):
            turn_pair16((at + c, across, matrix, to + c, second + c))


@numba.njit(nogil=True, cache=True)
def _mirrored(source: Any, target: Any, width: int, turns: Any, order: Any) -> None:
    """Odd s: complex row i = α·Z[q] + ᾱ·Z[s-q] for output ``order[i]``, or i where it is empty."""
    s = turns.shape[0]
    row = width * 4
    base, out = source.ctypes.data, target.ctypes.data
    for i in range(s):
        k = order[i] if order.size else i
        near = (2 * k + 1) % s
        far = (s - near) % s
        turn = turns.ctypes.data + i * 8
        for c in range(0, row // 2, LINE):
            _turn_mirrored16((base + near * row + c, base + far * row + c, row // 2, turn, out + i * row + c))


@numba.njit(nogil=True, cache=True)
def _cascade(
    tiles: Any, addresses: Any, multipliers: Any, offset: int, width: int, first: Any, second: Any,
    public: Any,
) -> Any:  # fmt: skip
    """The tile of all s rows after three transforms around two twists, ``(s, width)``."""
    # Flat, because parallel loops take tuples of arrays, not tuples of tuples.
    passes, (enter, leave, order, flips) = public[:8], public[8:]
    s = addresses.shape[0]
    x, y, space = tiles[: s * width], tiles[s * width : 2 * s * width], tiles[2 * s * width :]
    odd = s % 2 == 1
    length, plane = (s, width // 2) if odd else (s // 2, width)
    placed, scales = np.empty(s, np.int64), np.empty(s, np.float32)
    for i in range(s):
        placed[i] = addresses[order[i]]
        scales[i] = multipliers[order[i]] * flips[i]
    if odd:
        load_tile(placed, scales, offset, x, width)
    else:
        load_tile(placed, scales, offset, y, width)
        _pairs(y, x, width, enter, True)
    for sweep in range(3):
        if transform(x, y, plane, length, passes, space):
            x, y = y, x
        twist = first if sweep == 0 else second if sweep == 1 else leave
        if odd:
            _mirrored(x, y, width, twist, order if sweep < 2 else order[:0])
            x, y = y, x
        elif sweep < 2:
            turn_rows(x, x, width, twist)
        else:
            _pairs(x, y, width, twist, False)
            x, y = y, x
    return x


@numba.njit(nogil=True, cache=True)
def _unit(s: int) -> int:
    """Columns come in multiples of this."""
    return LANES if s % 2 == 0 else 2 * LANES


@numba.njit(nogil=True, cache=True)
def _apply_columns(
    tiles: Any, addresses: Any, multipliers: Any, twists: Any, factors: Any, public: Any, operand: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    width = dct4_width(operand.shape[0])
    for first in range(begin, end, width):
        used = min(width, end - first)
        mixed = _cascade(tiles, addresses, multipliers, first * 4, used, twists[0], twists[1], public)
        store_halves(mixed, factors, operand.ctypes.data + first * 2, operand.strides[0], used)


@numba.njit(nogil=True, cache=True)
def _unapply_columns(
    tiles: Any, addresses: Any, multipliers: Any, twists: Any, factors: Any, public: Any, out: Any,
    begin: int, end: int, flags: Any,
) -> None:  # fmt: skip
    width = dct4_width(addresses.shape[0])
    for first in range(begin, end, width):
        used = min(width, end - first)
        mixed = _cascade(tiles, addresses, multipliers, first * 4, used, twists[1], twists[0], public)
        store_rows(mixed, factors, out.ctypes.data + first * 4, out.strides[0], used, flags)


@numba.njit(nogil=True, cache=True)
def _apply_tail(
    rows: Any, tiles: Any, addresses: Any, multipliers: Any, twists: Any, factors: Any, public: Any,
    operand: Any,
) -> None:  # fmt: skip
    s, d = operand.shape
    unit = _unit(s)
    if d % unit == 0:
        return
    data, half = np.zeros((rows.shape[0], unit), np.float32), np.empty((s, unit), np.uint16)
    tail_sources(rows, data, addresses)
    mixed = _cascade(tiles, addresses, multipliers, d // unit * unit * 4, unit, twists[0], twists[1], public)
    store_halves(mixed, factors, half.ctypes.data, half.strides[0], unit)
    copy_tail(half, operand)


@numba.njit(nogil=True, cache=True)
def _unapply_tail(
    result: Any, tiles: Any, addresses: Any, multipliers: Any, twists: Any, factors: Any, public: Any,
    out: Any, flags: Any,
) -> None:  # fmt: skip
    s, d = result.shape
    unit = _unit(s)
    if d % unit == 0:
        return
    values, back = np.zeros((s, unit), np.float32), np.empty((out.shape[0], unit), np.float32)
    tail_sources(result, values, addresses)
    mixed = _cascade(tiles, addresses, multipliers, d // unit * unit * 4, unit, twists[1], twists[0], public)
    store_rows(mixed, factors, back.ctypes.data, back.strides[0], unit, flags)
    copy_tail(back, out)


@numba.njit(nogil=True, cache=True)
def dct4_apply(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, twists: Any, public: Any, scale: Any,
    operand: Any, scratch: Any,
) -> None:  # fmt: skip
    """``operand = f16(scale · D₃·C·D₂·C·D₁·C · [rows·scales; σ·Gaussian])``.

    ``scratch`` has :func:`dct4_floats` floats at least.
    """
    s, d = operand.shape
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = signs[2] * scale
    full = d // _unit(s) * _unit(s)
    _apply_columns(scratch, addresses, multipliers, twists, factors, public, operand, 0, full)
    _apply_tail(rows, scratch, addresses, multipliers, twists, factors, public, operand)


@numba.njit(nogil=True, cache=True, parallel=True)
def dct4_apply_parallel(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, twists: Any, public: Any, scale: Any,
    operand: Any, tiles: Any,
) -> None:  # fmt: skip
    """:func:`dct4_apply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = operand.shape
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = signs[2] * scale
    full = d // _unit(s) * _unit(s)
    piece = piece_size(full, dct4_width(s), len(tiles))
    for p in numba.prange((full + piece - 1) // piece):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        _apply_columns(own, addresses, multipliers, twists, factors, public, operand, p * piece, end)
    _apply_tail(rows, tiles[0], addresses, multipliers, twists, factors, public, operand)


@numba.njit(nogil=True, cache=True)
def dct4_unapply(
    result: Any, signs: Any, twists: Any, public: Any, scales: Any, inverse: Any, out: Any, scratch: Any
) -> bool:
    """The first n rows of the inverse, unscaled; True if any is not finite."""
    s, d = result.shape
    addresses, factors = np.empty(s, np.int64), np.empty(scales.shape[0], np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    row_factors(scales, inverse, factors)
    flags = np.zeros(LANES, np.float32)
    full = d // _unit(s) * _unit(s)
    _unapply_columns(scratch, addresses, signs[2], twists, factors, public, out, 0, full, flags)
    _unapply_tail(result, scratch, addresses, signs[2], twists, factors, public, out, flags)
    return not finite(flags)


@numba.njit(nogil=True, cache=True, parallel=True)
def dct4_unapply_parallel(
    result: Any, signs: Any, twists: Any, public: Any, scales: Any, inverse: Any, out: Any, tiles: Any
) -> bool:
    """:func:`dct4_unapply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = result.shape
    addresses, factors = np.empty(s, np.int64), np.empty(scales.shape[0], np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    row_factors(scales, inverse, factors)
    full = d // _unit(s) * _unit(s)
    piece = piece_size(full, dct4_width(s), len(tiles))
    pieces = (full + piece - 1) // piece
    flags = np.zeros((pieces + 1, LANES), np.float32)
    third = signs[2]
    for p in numba.prange(pieces):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        _unapply_columns(own, addresses, third, twists, factors, public, out, p * piece, end, flags[p])
    _unapply_tail(result, tiles[0], addresses, third, twists, factors, public, out, flags[pieces])
    return not finite(flags)
