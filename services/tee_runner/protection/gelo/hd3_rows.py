"""One or two data rows back from a result of 16: dot products with rows of Aᵀ, no transform.

A decode step's. Shapes as in :mod:`tee_runner.protection.gelo.tiles`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.gelo.hd3_passes import SUMMED_ROWS, dot1, dot2, first_sums, last_sums
from tee_runner.protection.gelo.tiles import LANES, LINE, finite, require_dense_rows, row_factors
from tee_runner.protection.integrity_kernels import CHUNK


@numba.njit(nogil=True, cache=True)
def rows_unapply(result: Any, inverse_rows: Any, scales: Any, inverse: Any, out: Any) -> bool:
    """``out = inverse_rows · result · inverse / scales``; True if a value is not finite.

    ``result`` (16, d); ``inverse_rows`` (n, 16) f32, n at most 2.
    """
    n, d = out.shape
    factors = np.empty(n, np.float32)
    row_factors(scales, inverse, factors)
    require_dense_rows(result)
    require_dense_rows(out)
    flags = np.zeros(LANES, np.float32)
    weights, factor, flag = inverse_rows.ctypes.data, factors.ctypes.data, flags.ctypes.data
    at, stride, to, out_stride = result.ctypes.data, result.strides[0], out.ctypes.data, out.strides[0]
    full = d // LANES * LANES
    for c in range(0, full * 4, LINE):
        if n == 1:
            dot1((at + c, stride, weights, factor, to + c, out_stride, flag))
        else:
            dot2((at + c, stride, weights, factor, to + c, out_stride, flag))
    for c in range(full, d):
        out[:, c] = np.float32(0.0)
        for j in range(LANES):
            value = result[j, c]
            for i in range(n):
                out[i, c] += inverse_rows[i, j] * value
        for i in range(n):
            out[i, c] *= factors[i]
            flags[0] += out[i, c] * np.float32(0.0)
    return not finite(flags)


@numba.njit(nogil=True, cache=True)
def row_unapply_summed(
    result: Any, inverse_row: Any, scales: Any, inverse: Any, out: Any, v: Any, sums: Any
) -> bool:
    """:func:`rows_unapply` for n = 1, and ``sums = result · vᵀ``, in one pass over the answer.

    ``result`` (16, d), d a multiple of 16; ``v`` (2, d) f32; ``sums`` (16, 2) f64.
    """
    factors = np.empty(1, np.float32)
    row_factors(scales, inverse, factors)
    require_dense_rows(result)
    require_dense_rows(out)
    flags, parts = np.zeros(LANES, np.float32), np.empty((2 * SUMMED_ROWS, LANES), np.float32)
    weights, stride, d = inverse_row.ctypes.data, result.strides[0], result.shape[1]
    sums[:] = 0.0
    for first in range(0, d, CHUNK):
        columns = min(CHUNK, d - first)
        v0, v1 = v.ctypes.data + first * 4, v.ctypes.data + v.strides[0] + first * 4
        for half in range(2):
            top = half * SUMMED_ROWS
            at = result.ctypes.data + top * stride + first * 4
            arguments = (
                at, stride, weights + top * 4, out.ctypes.data + first * 4, v0, v1, columns * 4,
                parts.ctypes.data, factors.ctypes.data, flags.ctypes.data,
            )  # fmt: skip
            if half == 0:
                first_sums(arguments)
            else:
                last_sums(arguments)
            for i in range(SUMMED_ROWS):
                for p in range(2):
                    total = np.float32(0.0)
                    for x in parts[2 * i + p]:
                        total += x
                    sums[top + i, p] += np.float64(total)
    return not finite(flags)
