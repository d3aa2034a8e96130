"""Loops of the integrity check: sums of f16 operands and f32 results against secret vectors.

Products and short sums are float32 in vector registers; every :data:`CHUNK` columns they are
added to float64 totals, so that a sum's error does not grow with its length.

Shapes: ``operand`` (s, d_in) float16 as uint16; ``result`` (s, d_out) f32; ``v`` (k, d_out) f32,
``z`` (k, d_in) f32, k even; ``expected`` and ``sums`` (s, k) f64; ``tolerance`` (s,) f64.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from gelo.f16 import half_to_float

CHUNK = 512
# Rows that share a chunk of v while it is in the first-level cache.
_BLOCK = 8
_ZERO = np.float32(0.0)
_SUMS = {"reassoc", "contract", "nsz"}


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _four_sums(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    sum_a, sum_b, sum_c, sum_d = _ZERO, _ZERO, _ZERO, _ZERO
    for i in range(x.shape[0]):
        sum_a += x[i] * a[i]
        sum_b += x[i] * b[i]
        sum_c += x[i] * c[i]
        sum_d += x[i] * d[i]
    return sum_a, sum_b, sum_c, sum_d


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _add_four(out: Any, sums: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    for i in range(out.shape[0]):
        out[i] += sums[0] * a[i] + sums[1] * b[i] + sums[2] * c[i] + sums[3] * d[i]


@numba.njit(nogil=True, cache=True)
def _gram_rows(weight: Any, vectors: Any, out: Any, first: int, last: int) -> None:
    wide = np.empty((4, weight.shape[1]), np.float32)
    for j in range(first, last, 4):
        for r in range(4):
            own = wide[r]
            if j + r < last:
                row = weight[j + r]
                for i in range(row.shape[0]):
                    own[i] = half_to_float(row[i])
            else:
                own[:] = _ZERO
        for n in range(vectors.shape[0]):
            sums = _four_sums(vectors[n], wide[0], wide[1], wide[2], wide[3])
            _add_four(out[n], sums, wide[0], wide[1], wide[2], wide[3])


@numba.njit(nogil=True, cache=True, parallel=True)
def gram(weight: Any, vectors: Any, parts: Any) -> None:
    """``parts.sum(axis=0) = vectors · weightᵀ · weight`` in float32.

    ``weight`` ``(d_out, d_in)`` float16 as uint16, ``vectors`` ``(n, d_in)`` f32, ``parts``
    ``(threads, n, d_in)`` f32, zero.
    """
    rows, count = weight.shape[0], parts.shape[0]
    for part in numba.prange(count):
        _gram_rows(weight, vectors, parts[part], rows * part // count, rows * (part + 1) // count)


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _add_rows(weight: Any, v: Any, z: Any, first: int, last: int) -> None:
    columns = weight.shape[1]
    whole = first + (last - first) // 4 * 4
    for p in range(v.shape[0]):
        own = z[p]
        for j in range(first, whole, 4):
            a, b, c, d = (
                np.float64(v[p, j]),
                np.float64(v[p, j + 1]),
                np.float64(v[p, j + 2]),
                np.float64(v[p, j + 3]),
            )
            row_a, row_b, row_c, row_d = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
            for i in range(columns):
                own[i] += (
                    a * np.float64(half_to_float(row_a[i])) + b * np.float64(half_to_float(row_b[i]))
                    + c * np.float64(half_to_float(row_c[i])) + d * np.float64(half_to_float(row_d[i]))
                )  # fmt: skip
        for j in range(whole, last):
            a = np.float64(v[p, j])
            row_a = weight[j]
            for i in range(columns):
                own[i] += a * np.float64(half_to_float(row_a[i]))


@numba.njit(nogil=True, cache=True, parallel=True)
def project_weight(weight: Any, v: Any, parts: Any) -> None:
    """``parts.sum(axis=0) = v · weight`` in float64.

    ``weight`` ``(d_out, d_in)`` float16 as uint16, ``parts`` ``(threads, k, d_in)`` f64, zero.
    """
    rows, count = weight.shape[0], parts.shape[0]
    for part in numba.prange(count):
        _add_rows(weight, v, parts[part], rows * part // count, rows * (part + 1) // count)


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _operand_sums(row: Any, z0: Any, z1: Any) -> Any:
    a, b, square = _ZERO, _ZERO, _ZERO
    for c in range(row.shape[0]):
        x = half_to_float(row[c])
        a += x * z0[c]
        b += x * z1[c]
        square += x * x
    return a, b, square


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _result_sums(row: Any, v0: Any, v1: Any) -> Any:
    a, b = _ZERO, _ZERO
    for c in range(row.shape[0]):
        a += row[c] * v0[c]
        b += row[c] * v1[c]
    return a, b


@numba.njit(nogil=True, cache=True)
def _project_row(i: int, operand: Any, z: Any, gain: float, expected: Any, tolerance: Any) -> None:
    row = operand[i]
    squares = 0.0
    for p in range(0, z.shape[0], 2):
        first_total, second_total, squares = 0.0, 0.0, 0.0
        for first in range(0, row.shape[0], CHUNK):
            last = min(first + CHUNK, row.shape[0])
            a, b, square = _operand_sums(row[first:last], z[p, first:last], z[p + 1, first:last])
            first_total += np.float64(a)
            second_total += np.float64(b)
            squares += np.float64(square)
        expected[i, p] = first_total
        expected[i, p + 1] = second_total
    tolerance[i] = gain * math.sqrt(squares)


@numba.njit(nogil=True, cache=True)
def project(operand: Any, z: Any, gain: float, expected: Any, tolerance: Any) -> None:
    """``expected = operand · zᵀ`` and ``tolerance[i] = gain · ‖operand[i]‖``."""
    for i in range(operand.shape[0]):
        _project_row(i, operand, z, gain, expected, tolerance)


@numba.njit(nogil=True, cache=True, parallel=True)
def project_parallel(operand: Any, z: Any, gain: float, expected: Any, tolerance: Any) -> None:
    """:func:`project` on all threads."""
    for i in numba.prange(operand.shape[0]):
        _project_row(i, operand, z, gain, expected, tolerance)


@numba.njit(nogil=True, cache=True)
def wrong_rows(sums: Any, expected: Any, tolerance: Any, top: int, bottom: int) -> int:
    """How many rows of ``top`` to ``bottom`` have a sum too far from what is expected."""
    wrong = 0
    for i in range(top, bottom):
        # An operand that is not finite has no right answer.
        good = tolerance[i] < np.inf
        for p in range(sums.shape[1]):
            # A comparison with NaN is false: what is not a number is wrong.
            good = good and abs(sums[i, p] - expected[i, p]) <= tolerance[i]
        wrong += 0 if good else 1
    return wrong


@numba.njit(nogil=True, cache=True)
def _check_rows(
    result: Any, private: Any, v: Any, sums: Any, expected: Any, tolerance: Any, top: int, bottom: int
) -> int:
    """Rows of ``top`` to ``bottom`` that are wrong. The worker's memory is read in one place."""
    columns = result.shape[1]
    sums[top:bottom] = 0.0
    for first in range(0, columns, CHUNK):
        last = min(first + CHUNK, columns)
        for i in range(top, bottom):
            row, own = result[i, first:last], private[i, first:last]
            for c in range(row.shape[0]):
                own[c] = row[c]
            for p in range(0, v.shape[0], 2):
                a, b = _result_sums(own, v[p, first:last], v[p + 1, first:last])
                sums[i, p] += np.float64(a)
                sums[i, p + 1] += np.float64(b)
    return wrong_rows(sums, expected, tolerance, top, bottom)


@numba.njit(nogil=True, cache=True)
def check(result: Any, private: Any, v: Any, sums: Any, expected: Any, tolerance: Any) -> int:
    """Copy ``result`` to ``private`` and count the rows of that copy that are wrong.

    A row is right if ``|private[i]·v[p] - expected[i, p]| <= tolerance[i]`` for every p. Each
    float of ``result`` is read once; what is checked is the copy.
    """
    wrong = 0
    for top in range(0, result.shape[0], _BLOCK):
        bottom = min(top + _BLOCK, result.shape[0])
        wrong += _check_rows(result, private, v, sums, expected, tolerance, top, bottom)
    return wrong


@numba.njit(nogil=True, cache=True, parallel=True)
def check_parallel(result: Any, private: Any, v: Any, sums: Any, expected: Any, tolerance: Any) -> int:
    """:func:`check` on all threads."""
    rows = result.shape[0]
    blocks = -(-rows // _BLOCK)
    wrong = 0
    for block in numba.prange(blocks):
        bottom = min(block * _BLOCK + _BLOCK, rows)
        wrong += _check_rows(result, private, v, sums, expected, tolerance, block * _BLOCK, bottom)
    return wrong
