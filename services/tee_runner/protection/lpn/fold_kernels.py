"""Compiled loops that fold panels onto probes: what pools and weights are verified with.

Panels ``(p, rows, 16)`` uint32, int8 or int16, as in :mod:`.layout`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from tee_runner.protection.lpn.layout import LANES
from tee_runner.simd import I32, INTEGERS, Emitter, emitted

# Probes that are folded at a time: three vectors.
WIDTH = 48
_VECTORS = WIDTH // LANES
_ROW_BYTES = 4 * WIDTH
_BLOCK = 128


def _fold_row(item_bytes: int) -> Any:
    """Add one row of 16 elements, times 16 rows of ``WIDTH`` probes, to ``WIDTH`` sums."""

    def emit(e: Emitter, source: Any, probes: Any, sums: Any) -> None:
        builder = e.builder
        kind = ir.IntType(8 * item_bytes)
        undefined = ir.Constant(INTEGERS, ir.Undefined)
        totals = [e.load(e.offset(sums, v, 64), INTEGERS) for v in range(_VECTORS)]
        for c in range(LANES):
            word = e.load(e.offset(source, c, item_bytes), kind, item_bytes)
            wide = word if item_bytes == 4 else builder.sext(word, I32)
            first = builder.insert_element(undefined, wide, I32(0))
            splat = builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))
            for v in range(_VECTORS):
                probe = e.load(e.offset(probes, c * _VECTORS + v, 64), INTEGERS)
                totals[v] = builder.add(totals[v], builder.mul(splat, probe))
        for v in range(_VECTORS):
            e.store(totals[v], e.offset(sums, v, 64))

    return emitted(3, emit)


_fold_bytes, _fold_pairs, _fold_words = _fold_row(1), _fold_row(2), _fold_row(4)


@numba.njit(nogil=True, cache=True)
def _fold_block(panels: Any, probes: Any, sums: Any, top: int, bottom: int) -> None:
    size = panels.itemsize
    for p in range(panels.shape[0]):
        own = probes.ctypes.data + p * LANES * _ROW_BYTES
        start = panels.ctypes.data + p * panels.shape[1] * LANES * size
        for i in range(top, bottom):
            place = (start + i * LANES * size, own, sums.ctypes.data + i * _ROW_BYTES)
            if size == 1:
                _fold_bytes(place)
            elif size == 2:
                _fold_pairs(place)
            else:
                _fold_words(place)


@numba.njit(nogil=True, cache=True, parallel=True)
def fold(panels: Any, probes: Any, sums: Any) -> None:
    """``sums += panels · probes`` modulo 2^32.

    ``probes`` ``(16 p, WIDTH)`` and ``sums`` ``(n, WIDTH)`` uint32, n at most the panels' rows.
    """
    rows = sums.shape[0]
    for block in numba.prange(-(-rows // _BLOCK)):
        _fold_block(panels, probes, sums, block * _BLOCK, min(rows, (block + 1) * _BLOCK))


@numba.njit(nogil=True, cache=True)
def _project_rows(panels: Any, v: Any, w: Any, top: int, bottom: int) -> None:
    for p in range(panels.shape[0]):
        width = min(LANES, v.shape[1] - p * LANES)
        for i in range(top, bottom):
            for probe in range(v.shape[0]):
                total = np.int64(0)
                for c in range(width):
                    total += np.int64(panels[p, i, c]) * np.int64(v[probe, p * LANES + c])
                w[probe, i] += total


@numba.njit(nogil=True, cache=True, parallel=True)
def project(panels: Any, v: Any, w: Any) -> None:
    """``w += v · panelsᵀ`` modulo 2^64: ``v`` ``(k, d_out)`` int32, ``w`` ``(k, d_in)`` int64.

    ``panels`` are those of the transposed weight, int8 or int16.
    """
    rows = w.shape[1]
    for block in numba.prange(-(-rows // _BLOCK)):
        _project_rows(panels, v, w, block * _BLOCK, min(rows, (block + 1) * _BLOCK))
