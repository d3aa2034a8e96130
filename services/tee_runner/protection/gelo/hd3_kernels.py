"""The HD3 cascade on column tiles, in passes that keep up to 16 rows in registers.

The three transforms run over the row index's digits (radix 16, 8 or 4) in alternating order,
so that the last pass of one and the first of the next visit the same rows: both are done, with
the sign flip between them, in one visit. Loading, scaling, the conversion to f16 and the way
out are part of the first and the last pass. With s = 16 that is a single pass over the data.

Shapes as in :mod:`tee_runner.protection.gelo.tiles`; ``signs`` (3, s) f32 holds the diagonals
of D₁, D₂, D₃; s is a power of two, at least 16.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.gelo.hd3_passes import (
    cascade_half16,
    cascade_rows16,
    double4,
    double8,
    double16,
    first8,
    first16,
    half4,
    half8,
    half16,
    rows4,
    rows8,
    rows8_past,
    rows16,
    rows16_past,
    single4,
    single8,
    single16,
)
from tee_runner.protection.gelo.hd3_plan import (
    last_pass,
    pass_count,
    radix_of,
    row_step,
    span_of,
)
from tee_runner.protection.gelo.tiles import (
    AHEAD,
    LANES,
    LINE,
    apply_sources,
    copy_tail,
    finite,
    goes_past,
    piece_size,
    require_dense_rows,
    row_factors,
    settle,
    tail_sources,
    tile_width,
    unapply_sources,
)


@numba.njit(nogil=True, cache=True)
def _begin(addresses: Any, multipliers: Any, offset: int, tile: int, radix: int, width: int) -> None:
    """The first pass: load and transform neighbouring rows."""
    row = width * 4
    group = radix * row + LINE
    # Data rows and shield rows are about as far apart.
    ahead = AHEAD * (addresses[1] - addresses[0])
    for b in range(addresses.shape[0] // radix):
        at = tile + b * group
        source = addresses.ctypes.data + b * radix * 8
        scale = multipliers.ctypes.data + b * radix * 4
        for c in range(0, row, LINE):
            if radix == 16:
                first16((source, scale, offset + c, at + c, row, ahead))
            else:
                first8((source, scale, offset + c, at + c, row, ahead))


@numba.njit(nogil=True, cache=True)
def _pass(tile: int, s: int, width: int, span: int, radix: int, leading: int, step: int, signs: int) -> None:
    """One pass in the tile; with ``signs`` (not 0) two transforms around a sign flip."""
    row = width * 4
    for start in range(0, s, span * radix):
        for a in range(start, start + span):
            at = tile + a * row + a // leading * LINE
            sign = signs + a * 4
            for c in range(0, row, LINE):
                if signs == 0:
                    if radix == 16:
                        single16((at + c, step))
                    elif radix == 8:
                        single8((at + c, step))
                    else:
                        single4((at + c, step))
                elif radix == 16:
                    double16((at + c, step, sign, span * 4))
                elif radix == 8:
                    double8((at + c, step, sign, span * 4))
                else:
                    double4((at + c, step, sign, span * 4))


@numba.njit(nogil=True, cache=True)
def _middle(tile: int, s: int, width: int, first: int, second: int) -> None:
    """Everything between the first and the last pass; addresses of the two inner diagonals.

    The transforms run over the digits 0 … p, p … 0, 0 … 1 with two digits, and over
    0 … p, p 0 2 … 1, 1 … p 0 with more: what ends one begins the next.
    """
    passes = pass_count(s)
    leading = radix_of(s, 0)
    top = passes - 1
    joint = 0 if passes == 2 else 1
    for sweep in range(3):
        skip = top if sweep == 0 else joint
        for index in range(passes):
            # The digits that join two transforms, or begin or end the cascade, are elsewhere.
            if index == skip or index == (0 if sweep == 0 else top if sweep == 1 else last_pass(s)):
                continue
            span = span_of(s, index)
            _pass(tile, s, width, span, radix_of(s, index), leading, row_step(span, leading, width), 0)
        if sweep < 2:
            span = span_of(s, skip)
            signs = first if sweep == 0 else second
            _pass(tile, s, width, span, radix_of(s, skip), leading, row_step(span, leading, width), signs)


@numba.njit(nogil=True, cache=True)
def _apply_tile(
    tile: Any, addresses: Any, multipliers: Any, signs: Any, factors: Any, offset: int, width: int,
    out: int, stride: int,
) -> None:  # fmt: skip
    """``width`` columns of the operand to ``out``; the sources start ``offset`` bytes into rows."""
    s = addresses.shape[0]
    diagonals = signs.ctypes.data
    factor = factors.ctypes.data
    if s == LANES:
        for c in range(0, width * 4, LINE):
            cascade_half16(
                (addresses.ctypes.data, multipliers.ctypes.data, offset + c, diagonals,
                 diagonals + LANES * 4, factor, out + c // 2, stride)
            )  # fmt: skip
        return
    at = tile.ctypes.data
    leading = radix_of(s, 0)
    _begin(addresses, multipliers, offset, at, leading, width)
    _middle(at, s, width, diagonals, diagonals + s * 4)
    radix, span = radix_of(s, last_pass(s)), span_of(s, last_pass(s))
    step = row_step(span, leading, width)
    # The rows of the next group, or of the one after it.
    ahead = (radix if span == 1 else 2) * stride
    for group in range(s // radix):
        a = group // span * span * radix + group % span
        place = at + a * width * 4 + a // leading * LINE
        for c in range(0, width * 4, LINE):
            to = out + a * stride + c // 2
            if radix == 16:
                half16((place + c, step, factor + a * 4, span, to, stride, ahead))
            elif radix == 8:
                half8((place + c, step, factor + a * 4, span, to, stride, ahead))
            else:
                half4((place + c, step, factor + a * 4, span, to, stride, ahead))


@numba.njit(nogil=True, cache=True)
def _unapply_tile(
    tile: Any, addresses: Any, signs: Any, factors: Any, offset: int, width: int, n: int, out: int,
    stride: int, flags: Any, past: bool,
) -> None:  # fmt: skip
    """``width`` columns of the first n rows of Aᵀ·result to ``out``; ``factors`` (s,), 0 from n on."""
    s = addresses.shape[0]
    diagonals = signs.ctypes.data
    third = diagonals + 2 * s * 4
    factor = factors.ctypes.data
    flag = flags.ctypes.data
    if s == LANES:
        for c in range(0, width * 4, LINE):
            cascade_rows16(
                (addresses.ctypes.data, third, offset + c, diagonals + s * 4, diagonals, n, factor,
                 out + c, stride, flag)
            )  # fmt: skip
        return
    at = tile.ctypes.data
    leading = radix_of(s, 0)
    _begin(addresses, signs[2], offset, at, leading, width)
    _middle(at, s, width, diagonals + s * 4, diagonals)
    radix, span = radix_of(s, last_pass(s)), span_of(s, last_pass(s))
    step = row_step(span, leading, width)
    # The rows of the next group, or of the one after it.
    ahead = (radix if span == 1 else 2) * stride
    for group in range(s // radix):
        a = group // span * span * radix + group % span
        place = at + a * width * 4 + a // leading * LINE
        for c in range(0, width * 4, LINE):
            if past and radix == 16:
                rows16_past((place + c, step, a, span, n, factor, out + c, stride, flag))
            elif past and radix == 8:
                rows8_past((place + c, step, a, span, n, factor, out + c, stride, flag))
            elif radix == 16:
                rows16((place + c, step, a, span, n, factor, out + c, stride, flag, ahead))
            elif radix == 8:
                rows8((place + c, step, a, span, n, factor, out + c, stride, flag, ahead))
            else:
                rows4((place + c, step, a, span, n, factor, out + c, stride, flag, ahead))


@numba.njit(nogil=True, cache=True)
def _apply_tail(
    rows: Any, tile: Any, addresses: Any, multipliers: Any, signs: Any, factors: Any, operand: Any
) -> None:
    s, d = operand.shape
    if d % LANES == 0:
        return
    data, half = np.zeros((rows.shape[0], LANES), np.float32), np.empty((s, LANES), np.uint16)
    tail_sources(rows, data, addresses)
    offset = d // LANES * LINE
    _apply_tile(
        tile, addresses, multipliers, signs, factors, offset, LANES, half.ctypes.data, half.strides[0]
    )
    copy_tail(half, operand)


@numba.njit(nogil=True, cache=True)
def _unapply_tail(
    result: Any, tile: Any, addresses: Any, signs: Any, factors: Any, out: Any, flags: Any
) -> None:
    s, d = result.shape
    if d % LANES == 0:
        return
    values, back = np.zeros((s, LANES), np.float32), np.empty((out.shape[0], LANES), np.float32)
    tail_sources(result, values, addresses)
    offset = d // LANES * LINE
    _unapply_tile(
        tile,
        addresses,
        signs,
        factors,
        offset,
        LANES,
        out.shape[0],
        back.ctypes.data,
        back.strides[0],
        flags,
        False,
    )
    copy_tail(back, out)


@numba.njit(nogil=True, cache=True)
def hd3_apply(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """``operand = f16(scale · D₃H D₂H D₁H · [rows·scales; σ·Gaussian])``, H unnormalised.

    ``scratch`` has :func:`tile_floats` floats at least.
    """
    s, d = operand.shape
    width = tile_width(s)
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = signs[2] * scale
    full = d // LANES * LANES
    for first in range(0, full, width):
        _apply_tile(
            scratch, addresses, multipliers, signs, factors, first * 4, min(width, full - first),
            operand.ctypes.data + first * 2, operand.strides[0],
        )  # fmt: skip
    _apply_tail(rows, scratch, addresses, multipliers, signs, factors, operand)


@numba.njit(nogil=True, cache=True, parallel=True)
def hd3_apply_parallel(
    rows: Any, scales: Any, normals: Any, sigma: Any, signs: Any, scale: Any, operand: Any, tiles: Any
) -> None:
    """:func:`hd3_apply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = operand.shape
    width = tile_width(s)
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = signs[2] * scale
    full = d // LANES * LANES
    piece = piece_size(full, width, len(tiles))
    for p in numba.prange((full + piece - 1) // piece):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        for first in range(p * piece, end, width):
            _apply_tile(
                own, addresses, multipliers, signs, factors, first * 4, min(width, end - first),
                operand.ctypes.data + first * 2, operand.strides[0],
            )  # fmt: skip
    _apply_tail(rows, tiles[0], addresses, multipliers, signs, factors, operand)


@numba.njit(nogil=True, cache=True)
def hd3_unapply(result: Any, signs: Any, scales: Any, inverse: Any, out: Any, scratch: Any) -> bool:
    """The first n rows of the inverse transform, unscaled; True if any is not finite."""
    s, d = result.shape
    width = tile_width(s)
    addresses, factors = np.empty(s, np.int64), np.zeros(s, np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    past = goes_past(out)
    row_factors(scales, inverse, factors)
    flags = np.zeros(LANES, np.float32)
    full = d // LANES * LANES
    for first in range(0, full, width):
        _unapply_tile(
            scratch, addresses, signs, factors, first * 4, min(width, full - first), out.shape[0],
            out.ctypes.data + first * 4, out.strides[0], flags, past,
        )  # fmt: skip
    _unapply_tail(result, scratch, addresses, signs, factors, out, flags)
    settle((0,))
    return not finite(flags)


@numba.njit(nogil=True, cache=True, parallel=True)
def hd3_unapply_parallel(result: Any, signs: Any, scales: Any, inverse: Any, out: Any, tiles: Any) -> bool:
    """:func:`hd3_unapply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = result.shape
    width = tile_width(s)
    addresses, factors = np.empty(s, np.int64), np.zeros(s, np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    past = goes_past(out)
    row_factors(scales, inverse, factors)
    full = d // LANES * LANES
    piece = piece_size(full, width, len(tiles))
    pieces = (full + piece - 1) // piece
    flags = np.zeros((pieces + 1, LANES), np.float32)
    for p in numba.prange(pieces):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        for first in range(p * piece, end, width):
            _unapply_tile(
                own, addresses, signs, factors, first * 4, min(width, end - first), out.shape[0],
                out.ctypes.data + first * 4, out.strides[0], flags[p], past,
            )  # fmt: skip
        settle((0,))
    _unapply_tail(result, tiles[0], addresses, signs, factors, out, flags[pieces])
    return not finite(flags)
