"""Compiled loops of the sweep: pool and weights read in order, the same for every secret.

Everything is in *column panels* of 16: ``G``, ``P`` and r in uint32, the weight in int8 or int16.
A *group* is a run of rows of a panel that fills at most one 4 KiB page; a *tile* is 64 rows of r or
r·W by 16 columns, one page. A group's entries (which row of the group, which row of the tile, which
value) lie in a fixed number of slots, the rest of them with value 0 (:mod:`.slots`). So every sweep
of one shape does the same instructions on the same pages in the same order.

Addresses are integers, in bytes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tee_runner.protection.lpn.layout import LANES, TILE_BYTES, TILE_ROWS
from tee_runner.simd import I32, INTEGERS, POINTER, Emitter, emitted

_LINE = 64
_LOW = 0xFFFF
_NARROW = {1: ir.VectorType(ir.IntType(8), LANES), 2: ir.VectorType(ir.IntType(16), LANES)}


def _add_product(e: Emitter, source: Any, tile: Any, value: Any) -> None:
    product = e.builder.mul(e.load(source, INTEGERS, _LINE), e.splat_integer(e.builder.trunc(value, I32)))
    e.store(e.builder.add(e.load(tile, INTEGERS, _LINE), product), tile, _LINE)


def _add_narrow_product(size: int) -> Any:
    def emit(e: Emitter, source: Any, tile: Any, value: Any) -> None:
        wide = e.builder.sext(e.load(source, _NARROW[size], size * LANES), INTEGERS)
        product = e.builder.mul(wide, e.splat_integer(e.builder.trunc(value, I32)))
        e.store(e.builder.add(e.load(tile, INTEGERS, _LINE), product), tile, _LINE)

    return emit


def _add_lane(e: Emitter, tile: Any, lane: Any, value: Any) -> None:
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    chosen = e.builder.icmp_unsigned("==", lanes, e.splat_integer(e.builder.trunc(lane, I32)))
    added = e.builder.select(chosen, e.splat_integer(e.builder.trunc(value, I32)), e.integer(0))
    e.store(e.builder.add(e.load(tile, INTEGERS, _LINE), added), tile, _LINE)


def _copy_line(e: Emitter, source: Any, target: Any) -> None:
    e.store(e.load(source, INTEGERS, _LINE), target, _LINE)


def _clear_line(e: Emitter, target: Any) -> None:
    e.store(e.integer(0), target, _LINE)


_words = emitted(3, _add_product)
_bytes = emitted(3, _add_narrow_product(1))
_pairs = emitted(3, _add_narrow_product(2))
_lane = emitted(3, _add_lane)
_copy = emitted(2, _copy_line)
_clear = emitted(1, _clear_line)
_prefetch = emitted(1, lambda e, address: e.prefetch(address, level=1))


@intrinsic
def _touch(typing_context: Any, address: Any) -> Any:
    """Read the first word of the line at ``address``; the read cannot be left out."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], POINTER)
        builder.load_atomic(pointer, "monotonic", 4, typ=I32)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@numba.njit(nogil=True, cache=True)
def _touch_lines(address: int, count: int) -> None:
    """Read each line of a group and prefetch the same line of the next."""
    for line in range(0, count, _LINE):
        _touch(address + line)
        _prefetch((address + count + line,))


@numba.njit(nogil=True, cache=True)
def _add_words(source: int, tile: int, places: Any, values: Any) -> None:
    for s in range(places.shape[0]):
        place = np.int64(places[s])
        _words((source + (place & _LOW), tile + (place >> 16), np.int64(values[s])))


@numba.njit(nogil=True, cache=True)
def _add_bytes(source: int, tile: int, places: Any, values: Any) -> None:
    for s in range(places.shape[0]):
        place = np.int64(places[s])
        _bytes((source + (place & _LOW), tile + (place >> 16), np.int64(values[s])))


@numba.njit(nogil=True, cache=True)
def _add_pairs(source: int, tile: int, places: Any, values: Any) -> None:
    for s in range(places.shape[0]):
        place = np.int64(places[s])
        _pairs((source + (place & _LOW), tile + (place >> 16), np.int64(values[s])))


@numba.njit(nogil=True, cache=True)
def _add_lanes(tile: int, first: int, row_shift: int, places: Any, values: Any) -> None:
    for s in range(places.shape[0]):
        place = np.int64(places[s])
        _lane((tile + (place >> 16), ((place & _LOW) >> row_shift) - first, np.int64(values[s])))


@numba.njit(nogil=True, cache=True)
def _sweep_pool(pool: int, group_bytes: int, tile: int, places: Any, values: Any) -> None:
    """Add the slots ``(groups, quota)`` of one tile, over one panel of a pool."""
    for g in range(places.shape[0]):
        page = pool + g * group_bytes
        _touch_lines(page, group_bytes)
        _add_words(page, tile, places[g], values[g])


@numba.njit(nogil=True, cache=True)
def _sweep_weight(
    weight: int, item_bytes: int, group_bytes: int, tile: int, places: Any, values: Any
) -> None:
    for g in range(places.shape[0]):
        page = weight + g * group_bytes
        _touch_lines(page, group_bytes)
        if item_bytes == 1:
            _add_bytes(page, tile, places[g], values[g])
        else:
            _add_pairs(page, tile, places[g], values[g])


@numba.njit(nogil=True, cache=True)
def _begin(tile: int, out: int, stride: int, again: bool) -> None:
    for row in range(TILE_ROWS):
        if again:
            _copy((out + row * stride, tile + row * _LINE))
        else:
            _clear((tile + row * _LINE,))


@numba.njit(nogil=True, cache=True)
def _end(tile: int, out: int, stride: int) -> None:
    for row in range(TILE_ROWS):
        _copy((tile + row * _LINE, out + row * stride))
        _clear((tile + row * _LINE,))


@numba.njit(nogil=True, cache=True)
def _sweep_panels(
    part: int, parts: int, first: int, last: int, matrix: int, matrix_panels: int, matrix_stride: int,
    pool: int, pool_stride: int, f_group: int, f_places: Any, f_values: Any, weight: int,
    weight_stride: int, item_bytes: int, e_group: int, e_places: Any, e_values: Any, tile: int, r: Any,
    R: Any, again: bool,
) -> None:  # fmt: skip
    e_rows = e_group // (LANES * item_bytes)
    row_shift = 4 if item_bytes == 1 else 5
    for panel in range(first + part, last, parts):
        for t in range(f_places.shape[0]):
            if panel < matrix_panels:
                out, stride = r.ctypes.data + panel * _LINE, r.shape[1] * 4
                _begin(tile, out + t * TILE_ROWS * stride, stride, again)
                _sweep_pool(matrix + panel * matrix_stride, f_group, tile, f_places[t], f_values[t])
                column = panel * LANES
                for g in range(column // e_rows, (column + LANES - 1) // e_rows + 1):
                    if g < e_places.shape[1]:
                        _add_lanes(tile, column - g * e_rows, row_shift, e_places[t, g], e_values[t, g])
            else:
                own = panel - matrix_panels
                out, stride = R.ctypes.data + own * _LINE, R.shape[1] * 4
                _begin(tile, out + t * TILE_ROWS * stride, stride, again)
                _sweep_pool(pool + own * pool_stride, f_group, tile, f_places[t], f_values[t])
                _sweep_weight(
                    weight + own * weight_stride, item_bytes, e_group, tile, e_places[t], e_values[t]
                )
            _end(tile, out + t * TILE_ROWS * stride, stride)


@numba.njit(nogil=True, cache=True, parallel=True)
def sweep(
    first: int, last: int, matrix: Any, pool: Any, weight: Any, f_rows: int, f_places: Any, f_values: Any,
    e_rows: int, e_places: Any, e_values: Any, tiles: Any, r: Any, R: Any, again: bool,
) -> None:  # fmt: skip
    """Panels ``first`` to ``last`` of r = e + f·G, which come first, and R = f·P + e·Wᵀ, modulo 2^32.

    Args:
        matrix: G in panels ``(p_in, k', 16)`` uint32, on pages.
        pool: P in panels ``(p_out, k', 16)`` uint32, on pages.
        weight: Wᵀ in panels ``(p_out, d', 16)`` int8 or int16, on pages.
        f_rows: rows of a group of G and P; a power of two, at most a page.
        f_places: ``(tiles, groups, quota)`` uint32: bytes into the group, and into the tile times 2^16.
        f_values: likewise, the factor.
        e_rows, e_places, e_values: the same for groups of rows of ``weight``.
        tiles: scratch on pages, zero, ``(parts, 64, 16)`` uint32; zero again afterwards.
        r: ``(64·tiles, 16·p_in)`` uint32, rows on cache lines.
        R: ``(64·tiles, 16·p_out)`` uint32, likewise.
        again: add to what r and R hold, instead of overwriting it.
    """
    item_bytes = weight.itemsize
    parts = tiles.shape[0]
    for part in numba.prange(parts):
        _sweep_panels(
            part, parts, first, last, matrix.ctypes.data, matrix.shape[0], matrix.shape[1] * _LINE,
            pool.ctypes.data, pool.shape[1] * _LINE, f_rows * _LINE, f_places, f_values,
            weight.ctypes.data, weight.shape[1] * LANES * item_bytes, item_bytes,
            e_rows * LANES * item_bytes, e_places, e_values, tiles.ctypes.data + part * TILE_BYTES, r, R,
            again,
        )  # fmt: skip
