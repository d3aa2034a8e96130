"""Rows of a large table by secret index, without the index choosing what is read.

An ordinary lookup touches one row, and whoever watches this machine's page faults or its memory bus
sees which. Here every row of the table is read, in order, for every batch of indices, and compared and
merged in registers: which addresses are touched, and when, depends on the sizes alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.simd import I32, I64, INTEGERS, Emitter, emitted

# Indices merged at a time: their rows' parts stay in registers.
GROUP = 8
# Bytes of one vector, and rows of the table that stay in L2 while all indices look at them.
_LINE = 64
_BLOCK = 64
# Pieces of the table, for threads; each has its own partial result.
_PIECES = 8


def _merge(
    e: Emitter, rows: Any, stride: Any, first: Any, end: Any, ids: Any, merged: Any, merged_stride: Any
) -> None:
    """64 bytes of rows ``first`` … ``end`` - 1 into those of the group whose index is that row."""
    builder = e.builder
    wanted = [e.splat_integer(e.load(e.offset(ids, i, 4), I32)) for i in range(GROUP)]
    places = [e.offset(merged, i, merged_stride) for i in range(GROUP)]
    begun = [e.load(place, INTEGERS) for place in places]
    entry = builder.block
    loop = builder.function.append_basic_block("rows")
    done = builder.function.append_basic_block("rows_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    row, address = builder.phi(I64), builder.phi(I64)
    found = [builder.phi(INTEGERS) for _ in range(GROUP)]
    row.add_incoming(first, entry)
    address.add_incoming(rows, entry)
    for value, start in zip(found, begun, strict=True):
        value.add_incoming(start, entry)
    here = e.load(address, INTEGERS, 1)
    number = e.splat_integer(builder.trunc(row, I32))
    after = [
        builder.select(builder.icmp_signed("==", index, number), here, value)
        for index, value in zip(wanted, found, strict=True)
    ]
    following, onward = builder.add(row, I64(1)), builder.add(address, stride)
    row.add_incoming(following, loop)
    address.add_incoming(onward, loop)
    for value, new in zip(found, after, strict=True):
        value.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    for place, value in zip(places, after, strict=True):
        e.store(value, place)


_merge_rows = emitted(7, _merge)


@numba.njit(nogil=True, cache=True)
def _sweep(table: Any, first: int, end: int, ids: Any, merged: Any) -> None:
    """Rows ``first`` … ``end`` - 1 of ``table`` into ``merged`` ``(m, bytes)``."""
    size = table.shape[1]
    for start in range(first, end, _BLOCK):
        stop = min(end, start + _BLOCK)
        for group in range(0, ids.shape[0], GROUP):
            index, target = ids.ctypes.data + 4 * group, merged.ctypes.data + group * size
            source = table.ctypes.data + start * size
            for at in range(0, size, _LINE):
                # The last vector overlaps the one before it.
                place = min(at, size - _LINE)
                _merge_rows((source + place, size, start, stop, index, target + place, size))


@numba.njit(nogil=True, cache=True)
def _sweep_narrow(table: Any, ids: Any, merged: Any) -> None:
    """The same for rows shorter than a vector."""
    for row in range(table.shape[0]):
        for i in range(ids.shape[0]):
            mask = np.uint8(-np.uint8(ids[i] == row))
            for at in range(table.shape[1]):
                merged[i, at] |= table[row, at] & mask


@numba.njit(nogil=True, cache=True, parallel=True)
def _sweep_all(table: Any, ids: Any, partial: Any) -> None:
    pieces = partial.shape[0]
    rows = (table.shape[0] + pieces - 1) // pieces
    for piece in numba.prange(pieces):
        partial[piece] = 0
        first, end = piece * rows, min(table.shape[0], (piece + 1) * rows)
        if first < end:
            _sweep(table, first, end, ids, partial[piece])


def gather(table: NDArray[Any], ids: NDArray[np.int64], *, oblivious: bool) -> NDArray[Any]:
    """``table[ids]`` for a ``table`` ``(rows, d)`` of any type; with ``oblivious`` by :func:`take_rows`."""
    if not oblivious:
        return table[ids]
    # Bytes of a copy, or a view: tables are contiguous in checkpoints.
    contiguous = np.ascontiguousarray(table)
    rows = take_rows(contiguous.view(np.uint8), ids)
    return np.ascontiguousarray(rows).view(table.dtype)


def take_rows(table: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """``table[ids]``, ``(n, bytes)``, of a C-contiguous ``table`` ``(rows, bytes)`` uint8; ``ids`` ``(n,)``.

    Reads all of the table, in order. Fewer than 2³¹ rows; an index outside the table gives zeros.

    Raises:
        ValueError: the table is no such matrix.
    """
    if table.dtype != np.uint8 or table.ndim != 2 or not table.flags.c_contiguous or len(table) >= 1 << 31:
        raise ValueError(f"not a matrix of bytes: {table.dtype} {table.shape}")
    count, size = len(ids), table.shape[1]
    wanted = np.full(-(-count // GROUP) * GROUP, -1, dtype=np.int32)
    wanted[:count] = ids
    if size < _LINE:
        merged = np.zeros((len(wanted), size), dtype=np.uint8)
        _sweep_narrow(table, wanted, merged)
    else:
        partial = np.empty((min(_PIECES, len(table)), len(wanted), size), dtype=np.uint8)
        _sweep_all(table, wanted, partial)
        merged = np.bitwise_or.reduce(partial, axis=0)
        partial.fill(0)
    wanted.fill(0)
    return merged[:count]
