"""Masks as dense matrices: a register-tiled product per column tile.

Shapes as in :mod:`tee_runner.protection.gelo.tiles`; ``mask`` ``(⌈s/4⌉·4, s)`` f32 is A with zero
rows below s, ``inverse_mask`` ``(⌈n/4⌉·4, s)`` the first n rows of its inverse, likewise.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

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
from tee_runner.vector import matmul_add


@numba.njit(nogil=True, cache=True)
def dense_floats(s: int, width: int) -> int:
    """Size of a tile and of its product."""
    return (2 * s + 3) * width


@numba.njit(nogil=True, cache=True)
def _mix(
    tiles: Any, addresses: Any, multipliers: Any, matrix: Any, offset: int, width: int
) -> Any:  # fmt: skip
    """``matrix`` times ``width`` columns of the sources; the product's tile."""
    s = addresses.shape[0]
    rows = matrix.shape[0]
    mixed = tiles[s * width : (s + rows) * width]
    load_tile(addresses, multipliers, offset, tiles, width)
    mixed[:] = np.float32(0.0)
    matmul_add(matrix.ctypes.data, s, tiles.ctypes.data, width, mixed.ctypes.data, width, rows, s, width)
    return mixed


@numba.njit(nogil=True, cache=True)
def _apply_tail(
    rows: Any, tiles: Any, addresses: Any, multipliers: Any, mask: Any, factors: Any, operand: Any
) -> None:
    s, d = operand.shape
    if d % LANES == 0:
        return
    data, half = np.zeros((rows.shape[0], LANES), np.float32), np.empty((s, LANES), np.uint16)
    tail_sources(rows, data, addresses)
    mixed = _mix(tiles, addresses, multipliers, mask, d // LANES * LINE, LANES)
    store_halves(mixed, factors, half.ctypes.data, half.strides[0], LANES)
    copy_tail(half, operand)


@numba.njit(nogil=True, cache=True)
def _unapply_tail(
    result: Any, tiles: Any, addresses: Any, ones: Any, inverse_mask: Any, factors: Any, out: Any,
    flags: Any,
) -> None:  # fmt: skip
    s, d = result.shape
    if d % LANES == 0:
        return
    values, back = np.zeros((s, LANES), np.float32), np.empty((out.shape[0], LANES), np.float32)
    tail_sources(result, values, addresses)
    mixed = _mix(tiles, addresses, ones, inverse_mask, d // LANES * LINE, LANES)
    store_rows(mixed, factors, back.ctypes.data, back.strides[0], LANES, flags)
    copy_tail(back, out)


@numba.njit(nogil=True, cache=True)
def dense_apply(
    rows: Any, scales: Any, normals: Any, sigma: Any, mask: Any, scale: Any, operand: Any, scratch: Any
) -> None:
    """``operand = f16(scale · mask · [rows·scales; σ·Gaussian])``.

    ``scratch`` has :func:`dense_floats` floats at least.
    """
    s, d = operand.shape
    width = tile_width(s)
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = np.full(s, scale, np.float32)
    full = d // LANES * LANES
    for first in range(0, full, width):
        used = min(width, full - first)
        mixed = _mix(scratch, addresses, multipliers, mask, first * 4, used)
        store_halves(mixed, factors, operand.ctypes.data + first * 2, operand.strides[0], used)
    _apply_tail(rows, scratch, addresses, multipliers, mask, factors, operand)


@numba.njit(nogil=True, cache=True, parallel=True)
def dense_apply_parallel(
    rows: Any, scales: Any, normals: Any, sigma: Any, mask: Any, scale: Any, operand: Any, tiles: Any
) -> None:
    """:func:`dense_apply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = operand.shape
    width = tile_width(s)
    addresses, multipliers = np.empty(s, np.int64), np.empty(s, np.float32)
    apply_sources(rows, scales, normals, sigma, addresses, multipliers)
    require_dense_rows(operand)
    factors = np.full(s, scale, np.float32)
    full = d // LANES * LANES
    piece = piece_size(full, width, len(tiles))
    for p in numba.prange((full + piece - 1) // piece):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        for first in range(p * piece, end, width):
            used = min(width, end - first)
            mixed = _mix(own, addresses, multipliers, mask, first * 4, used)
            store_halves(mixed, factors, operand.ctypes.data + first * 2, operand.strides[0], used)
    _apply_tail(rows, tiles[0], addresses, multipliers, mask, factors, operand)


@numba.njit(nogil=True, cache=True)
def dense_unapply(result: Any, inverse_mask: Any, scales: Any, inverse: Any, out: Any, scratch: Any) -> bool:
    """``out = (inverse_mask · result)[:n] · inverse / scales``; True if a value is not finite."""
    s, d = result.shape
    width = tile_width(s)
    addresses, ones = np.empty(s, np.int64), np.ones(s, np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    factors, flags = np.empty(scales.shape[0], np.float32), np.zeros(LANES, np.float32)
    row_factors(scales, inverse, factors)
    full = d // LANES * LANES
    for first in range(0, full, width):
        used = min(width, full - first)
        mixed = _mix(scratch, addresses, ones, inverse_mask, first * 4, used)
        store_rows(mixed, factors, out.ctypes.data + first * 4, out.strides[0], used, flags)
    _unapply_tail(result, scratch, addresses, ones, inverse_mask, factors, out, flags)
    return not finite(flags)


@numba.njit(nogil=True, cache=True, parallel=True)
def dense_unapply_parallel(
    result: Any, inverse_mask: Any, scales: Any, inverse: Any, out: Any, tiles: Any
) -> bool:
    """:func:`dense_unapply` on all threads; ``tiles`` (threads, floats of ``scratch`` at least)."""
    s, d = result.shape
    width = tile_width(s)
    addresses, ones = np.empty(s, np.int64), np.ones(s, np.float32)
    unapply_sources(result, addresses)
    require_dense_rows(out)
    factors = np.empty(scales.shape[0], np.float32)
    row_factors(scales, inverse, factors)
    full = d // LANES * LANES
    piece = piece_size(full, width, len(tiles))
    pieces = (full + piece - 1) // piece
    flags = np.zeros((pieces + 1, LANES), np.float32)
    for p in numba.prange(pieces):
        own = tiles[p]
        end = min(full, (p + 1) * piece)
        for first in range(p * piece, end, width):
            used = min(width, end - first)
            mixed = _mix(own, addresses, ones, inverse_mask, first * 4, used)
            store_rows(mixed, factors, out.ctypes.data + first * 4, out.strides[0], used, flags[p])
    _unapply_tail(result, tiles[0], addresses, ones, inverse_mask, factors, out, flags[pieces])
    return not finite(flags)
