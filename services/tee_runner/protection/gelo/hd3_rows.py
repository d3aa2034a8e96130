"""One or two data rows of 16: the columns of A that are theirs, and the rows back without a transform.

A decode step's. Shapes as in :mod:`tee_runner.protection.gelo.tiles`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.gelo.hd3_passes import dot1, dot2
from tee_runner.protection.gelo.tiles import LANES, LINE, finite, require_dense_rows, row_factors
from tee_runner.vector import walsh_hadamard


@numba.njit(nogil=True, cache=True)
def data_columns(signs: Any, columns: Any) -> float:
    """The first columns ``(s, n)`` of A for ``signs`` (3, s), not normalised; their largest magnitude."""
    s, n = columns.shape
    tile = np.zeros((s, s), np.float32)
    for i in range(s):
        tile[i, i] = 1.0
    for diagonal in range(3):
        walsh_hadamard(tile.ctypes.data, s, s)
        for i in range(s):
            tile[i] *= signs[diagonal, i]
    columns[...] = tile[:, :n]
    tile[...] = 0.0
    return np.abs(columns).max()


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
