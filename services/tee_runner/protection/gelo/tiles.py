"""Column tiles: what every family's kernels share.

A tile holds all s rows of a few columns and stays in L2 while it is transformed. Its rows
come from anywhere: ``addresses`` (s,) int64 says where each begins, ``multipliers`` (s,) f32
by what it is scaled as it is loaded. So data rows, shield rows and the worker's answer are read
in place, each float exactly once (the answer lies in memory that the worker can still change).

Kernels work on whole vectors of 16 columns. The last d mod 16 columns go through a padded copy.

Shapes: ``rows`` (n, d) f32; ``scales`` (n,) f32 powers of two; ``normals`` (shield_size,) f32
standard normal; ``operand`` (s, d) float16 as uint16; ``result`` (s, d) f32; s = n + k.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.simd import Emitter, emitted

# Floats of a tile: 256 Ki, 1 MiB. Wider tiles touch fewer pages per byte; a tile should stay in L2.
TILE_FLOATS = 1 << 18
_MIN_WIDTH, _MAX_WIDTH = 16, 64
LANES = 16
# Bytes of one vector of a row.
LINE = 64
# How many rows before they are read or written the lines of a row are asked for. Rows lie pages apart,
# which the processor's own prefetching does not follow: reading took HD3 6.4 ms without and 3.6 with it,
# writing float16 6.5 and 4.8, writing float32 13 and 7.7 (4096 rows of 2560, one core of a Xeon with AMX).
AHEAD = 32
# Data rows of this size are written past the caches: 4096 of 2560 values came back in 8.7 ms for 11.0, and
# reading them then took 3.2 ms for 3.0. Operands gain nothing, their float16 rows are half as long.
PAST_BYTES = 16 << 20


@numba.njit(nogil=True, cache=True)
def tile_width(s: int) -> int:
    """Columns of a tile of ``s`` rows: a multiple of 16."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, TILE_FLOATS // s // 16 * 16))


@numba.njit(nogil=True, cache=True)
def shield_stride(d: int) -> int:
    """Floats from one shield row to the next: whole pairs of vectors."""
    return (d + 2 * LANES - 1) // (2 * LANES) * 2 * LANES


@numba.njit(nogil=True, cache=True)
def shield_size(n: int, s: int, d: int) -> int:
    """Normals one apply consumes: s - n rows."""
    return (s - n) * shield_stride(d)


@numba.njit(nogil=True, cache=True)
def piece_size(columns: int, width: int, pieces: int) -> int:
    """Columns of each of at most ``pieces`` pieces of a parallel kernel: a multiple of the tile width."""
    tiles = (columns + width - 1) // width
    return max(1, (tiles + pieces - 1) // pieces) * width


@numba.njit(nogil=True, cache=True)
def require_dense_rows(values: Any) -> None:
    """Refuse an array whose rows are not contiguous: kernels go by addresses."""
    if values.shape[1] > 1 and values.strides[1] != values.itemsize:
        raise ValueError("rows must be contiguous")


@numba.njit(nogil=True, cache=True)
def goes_past(out: Any) -> bool:
    """Whether rows are written past the caches: they are many, and each begins on a line."""
    size = out.shape[0] * out.strides[0]
    return size >= PAST_BYTES and out.ctypes.data % LINE == 0 and out.strides[0] % LINE == 0


@numba.njit(nogil=True, cache=True)
def apply_sources(rows: Any, scales: Any, normals: Any, sigma: Any, addresses: Any, multipliers: Any) -> None:
    """Data rows times their scales, then shield rows times σ."""
    n, d = rows.shape
    stride = shield_stride(d) * 4
    require_dense_rows(rows)
    if normals.size < shield_size(n, addresses.shape[0], d):
        raise ValueError("too few normals")
    for i in range(n):
        addresses[i] = rows.ctypes.data + i * rows.strides[0]
        multipliers[i] = scales[i]
    for i in range(n, addresses.shape[0]):
        addresses[i] = normals.ctypes.data + (i - n) * stride
        multipliers[i] = sigma


@numba.njit(nogil=True, cache=True)
def unapply_sources(result: Any, addresses: Any) -> None:
    """The rows of a worker's answer."""
    require_dense_rows(result)
    for i in range(result.shape[0]):
        addresses[i] = result.ctypes.data + i * result.strides[0]


@numba.njit(nogil=True, cache=True)
def tail_sources(values: Any, tail: Any, addresses: Any) -> None:
    """Point the sources of ``values``' rows at a padded copy of its last d mod w columns.

    ``tail`` (rows, w) f32, zero; addresses stay relative to the row's first column.
    """
    rows, d = values.shape
    width = tail.shape[1]
    first = d // width * width
    for i in range(rows):
        for c in range(first, d):
            tail[i, c - first] = values[i, c]
        addresses[i] = tail.ctypes.data + (i * width - first) * 4


@numba.njit(nogil=True, cache=True)
def copy_tail(tail: Any, out: Any) -> None:
    """The last d mod w columns of ``out`` from a padded block ``(rows, w)``."""
    rows, d = out.shape
    first = d // tail.shape[1] * tail.shape[1]
    for i in range(rows):
        for c in range(first, d):
            out[i, c] = tail[i, c - first]


@numba.njit(nogil=True, cache=True)
def row_factors(scales: Any, inverse: Any, factors: Any) -> None:
    """``factors[i] = inverse / scales[i]``, exact where ``scales`` are powers of two."""
    for i in range(scales.shape[0]):
        factors[i] = inverse / scales[i]


@numba.njit(nogil=True, cache=True)
def finite(flags: Any) -> bool:
    """False if a value that was checked against these flags is a NaN or an infinity."""
    total = np.float32(0.0)
    for x in flags.flat:
        total += x
    return total == np.float32(0.0)


def _load_scaled(e: Emitter, source: Any, multiplier: Any, target: Any) -> None:
    e.store(e.builder.fmul(e.load(source), e.spread(multiplier)), target)


def _store_half(e: Emitter, source: Any, factor: Any, target: Any) -> None:
    e.store_half(e.builder.fmul(e.load(source), e.spread(factor)), target)


def _store_checked(e: Emitter, source: Any, factor: Any, target: Any, flags: Any) -> None:
    value = e.builder.fmul(e.load(source), e.spread(factor))
    e.check([value], flags)
    e.store(value, target)


# What this thread wrote past the caches is seen by others before what it writes next.
settle = emitted(1, lambda e, _: e.builder.fence("seq_cst"))
_load16, _half16, _checked16 = emitted(3, _load_scaled), emitted(3, _store_half), emitted(4, _store_checked)
_will_read = emitted(1, lambda e, address: e.prefetch(address))
_will_write = emitted(1, lambda e, address: e.prefetch(address, write=True))


@numba.njit(nogil=True, cache=True)
def load_tile(addresses: Any, multipliers: Any, offset: int, tile: Any, width: int) -> None:
    """Fill a tile ``(s, width)`` from its sources, ``offset`` bytes into their rows."""
    to = tile.ctypes.data
    scale = multipliers.ctypes.data
    for i in range(addresses.shape[0]):
        source = addresses[i] + offset
        follows = i + AHEAD < addresses.shape[0]
        following = addresses[i + AHEAD] + offset if follows else source
        for c in range(0, width * 4, LINE):
            if follows:
                _will_read((following + c,))
            _load16((source + c, scale + i * 4, to + i * width * 4 + c))


@numba.njit(nogil=True, cache=True)
def store_halves(tile: Any, factors: Any, out: int, stride: int, width: int) -> None:
    """Rows times ``factors`` (s,) as float16 to ``out``, rows ``stride`` bytes apart."""
    source = tile.ctypes.data
    scale = factors.ctypes.data
    for i in range(factors.shape[0]):
        follows = i + AHEAD < factors.shape[0]
        for c in range(0, width * 4, LINE):
            if follows:
                _will_write((out + (i + AHEAD) * stride + c // 2,))
            _half16((source + i * width * 4 + c, scale + i * 4, out + i * stride + c // 2))


@numba.njit(nogil=True, cache=True)
def store_rows(tile: Any, factors: Any, out: int, stride: int, width: int, flags: Any) -> None:
    """The first n rows times ``factors`` (n,) to ``out``; ``flags`` (16,) notes what is not finite."""
    source = tile.ctypes.data
    scale = factors.ctypes.data
    for i in range(factors.shape[0]):
        follows = i + AHEAD < factors.shape[0]
        for c in range(0, width * 4, LINE):
            if follows:
                _will_write((out + (i + AHEAD) * stride + c,))
            _checked16((source + i * width * 4 + c, scale + i * 4, out + i * stride + c, flags.ctypes.data))
