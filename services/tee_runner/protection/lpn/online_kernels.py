"""Compiled loops of one offload: quantise and blind, expect, unblind and check.

``rows`` (n, d_in) and ``out`` (n, d_out) f32, ``x`` (n, d_in) int32: the quantised rows. ``r`` and
``R`` uint32: ready blinding rows, of which n from ``first`` on are used and overwritten. ``v``
(k, d_out) int32 and ``w`` (k, d_in) int64: probes, see :mod:`.probes`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.lpn.quantise import SUM_LIMIT
from tee_runner.vector import bits_from_float, float_from_bits

# Columns that are in the first-level cache while all probes see them.
CHUNK = 1024
_BLOCK = 8
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NOT_FINITE = np.uint32(0x7F800000)
# A row whose largest magnitude is below 2^-100 counts as zero: its factor would overflow.
_TINY = np.float32(2.0**-100)
_OFFSET = np.uint32(SUM_LIMIT - 1)
_HIGHEST = np.uint32(2 * (SUM_LIMIT - 1))


@numba.njit(nogil=True, cache=True)
def _largest_bits(row: Any) -> Any:
    top = np.uint32(0)
    for i in range(row.shape[0]):
        top = max(top, bits_from_float(row[i]) & _MAGNITUDE)
    return top


@numba.njit(nogil=True, cache=True)
def _round(row: Any, factor: Any, x: Any) -> None:
    for i in range(row.shape[0]):
        x[i] = np.int32(np.rint(row[i] * factor))


@numba.njit(nogil=True, cache=True)
def _add_mask(x: Any, mask: Any, operand: Any) -> None:
    for i in range(x.shape[0]):
        operand[i] = np.uint32(np.uint32(x[i]) + mask[i])


@numba.njit(nogil=True, cache=True)
def _clear(mask: Any, count: int) -> None:
    for i in range(count):
        mask[i] = np.uint32(0)


@numba.njit(nogil=True, cache=True)
def _copy(x: Any, operand: Any) -> None:
    for i in range(x.shape[0]):
        operand[i] = np.uint32(x[i])


@numba.njit(nogil=True, cache=True)
def _blind_row(
    row: Any, levels: Any, blinded: bool, r: Any, ready: int, x: Any, scales: Any, operand: Any, i: int
) -> bool:
    top = _largest_bits(row)
    largest = float_from_bits(top)
    factor, scale = np.float32(0.0), np.float32(0.0)
    bad = top >= _NOT_FINITE
    if largest > _TINY and not bad:
        factor, scale = levels / largest, largest / levels
    scales[i] = scale
    if bad:
        x[i] = 0
    else:
        _round(row, factor, x[i])
    if blinded:
        _add_mask(x[i], r[ready], operand[i])
        _clear(r[ready], r.shape[1])
    else:
        _copy(x[i], operand[i])
    return bad


@numba.njit(nogil=True, cache=True)
def blind(
    rows: Any, levels: Any, blinded: bool, r: Any, first: int, x: Any, scales: Any, operand: Any
) -> bool:
    """``x = round(rows / scales)`` within ±``levels``, ``operand = x + r`` modulo 2^32.

    ``scales`` (n,) f32 are the rows' own, 0 for a zero row. True if a value is not finite; the
    operand is then blinded all the same but must not be used.
    """
    bad = False
    for i in range(rows.shape[0]):
        bad |= _blind_row(rows[i], levels, blinded, r, first + i, x, scales, operand, i)
    return bad


@numba.njit(nogil=True, cache=True, parallel=True)
def blind_parallel(
    rows: Any, levels: Any, blinded: bool, r: Any, first: int, x: Any, scales: Any, operand: Any
) -> bool:
    """:func:`blind` on all threads."""
    bad = 0
    for i in numba.prange(rows.shape[0]):
        bad += int(_blind_row(rows[i], levels, blinded, r, first + i, x, scales, operand, i))
    return bad > 0


@numba.njit(nogil=True, cache=True)
def _dot(a: Any, b: Any) -> Any:
    total = np.int64(0)
    for i in range(a.shape[0]):
        total += np.int64(a[i]) * np.int64(b[i])
    return total


@numba.njit(nogil=True, cache=True)
def expect(x: Any, w: Any, expected: Any) -> None:
    """``expected = x · wᵀ`` modulo 2^64, ``(n, k)`` int64."""
    for i in range(x.shape[0]):
        for p in range(w.shape[0]):
            expected[i, p] = _dot(x[i], w[p])


@numba.njit(nogil=True, cache=True, parallel=True)
def expect_parallel(x: Any, w: Any, expected: Any) -> None:
    """:func:`expect` on all threads."""
    for i in numba.prange(x.shape[0]):
        for p in range(w.shape[0]):
            expected[i, p] = _dot(x[i], w[p])


@numba.njit(nogil=True, cache=True)
def _lift(result: Any, mask: Any, u: Any) -> Any:
    """``u = result - mask`` as signed integers, ``mask`` cleared; the largest u + 2^30 - 1, unsigned."""
    top = np.uint32(0)
    for c in range(u.shape[0]):
        word = np.uint32(result[c] - mask[c])
        u[c] = np.int32(word)
        top = max(top, np.uint32(word + _OFFSET))
    return top


@numba.njit(nogil=True, cache=True)
def _lift_bare(result: Any, u: Any) -> Any:
    top = np.uint32(0)
    for c in range(u.shape[0]):
        word = result[c]
        u[c] = np.int32(word)
        top = max(top, np.uint32(word + _OFFSET))
    return top


@numba.njit(nogil=True, cache=True)
def _restore(u: Any, scale: Any, channel_scales: Any, out: Any) -> None:
    for c in range(u.shape[0]):
        out[c] = np.float32(u[c]) * (scale * channel_scales[c])


@numba.njit(nogil=True, cache=True)
def _unblind_rows(
    result: Any, blinded: bool, R: Any, first: int, v: Any, expected: Any, scales: Any, channel_scales: Any,
    u: Any, sums: Any, out: Any, top: int, bottom: int,
) -> int:  # fmt: skip
    columns = result.shape[1]
    wrong = 0
    for i in range(top, bottom):
        for p in range(v.shape[0]):
            sums[i, p] = -expected[i, p]
    for start in range(0, columns, CHUNK):
        end = min(start + CHUNK, columns)
        own = u[: end - start]
        for i in range(top, bottom):
            if blinded:
                mask = R[first + i, start:end]
                highest = _lift(result[i, start:end], mask, own)
                _clear(mask, end - start)
            else:
                highest = _lift_bare(result[i, start:end], own)
            wrong += int(highest > _HIGHEST)
            for p in range(v.shape[0]):
                sums[i, p] += _dot(own, v[p, start:end])
            _restore(own, scales[i], channel_scales[start:end], out[i, start:end])
    for i in range(top, bottom):
        for p in range(v.shape[0]):
            wrong += int(sums[i, p] != 0)
    return wrong


@numba.njit(nogil=True, cache=True)
def unblind(
    result: Any, blinded: bool, R: Any, first: int, v: Any, expected: Any, scales: Any, channel_scales: Any,
    u: Any, sums: Any, out: Any,
) -> int:  # fmt: skip
    """``out = u · scales · channel_scales``, u the signed integers ``result - R``; how much is wrong.

    Wrong is a value of u of magnitude 2^30 or more, or a probe with ``u·v != expected``. Each word of
    ``result``, which may be memory that the worker writes, is read once. ``u`` is scratch
    ``(parts, CHUNK)`` int32, ``sums`` ``(n, k)`` int64.
    """
    return _unblind_rows(
        result, blinded, R, first, v, expected, scales, channel_scales, u[0], sums, out, 0, result.shape[0]
    )


@numba.njit(nogil=True, cache=True, parallel=True)
def unblind_parallel(
    result: Any, blinded: bool, R: Any, first: int, v: Any, expected: Any, scales: Any, channel_scales: Any,
    u: Any, sums: Any, out: Any,
) -> int:  # fmt: skip
    """:func:`unblind` on all threads, one for each row of ``u``."""
    rows, parts = result.shape[0], u.shape[0]
    wrong = 0
    for part in numba.prange(parts):
        wrong += _unblind_rows(
            result, blinded, R, first, v, expected, scales, channel_scales, u[part], sums, out,
            rows * part // parts, rows * (part + 1) // parts,
        )  # fmt: skip
    return wrong
