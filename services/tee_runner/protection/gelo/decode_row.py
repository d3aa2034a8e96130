"""A decode step's single row: mixed and copied in one pass, and back in one pass over the answer.

Every family with one data row needs one row of Aᵀ for that: the first column of A. So the worker's answer,
which comes from another core's cache, is read once, and no private copy of it is written.

Shapes as in :mod:`tee_runner.protection.gelo.tiles`, n = 1; ``operand`` and ``sent`` (s, d) float16 as
uint16, d a multiple of 16 for the answer only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.protection.gelo.dense_kernels import dense_apply
from tee_runner.protection.gelo.hd3_kernels import hd3_apply
from tee_runner.protection.gelo.kernels import block_scales, row_scales, to_half_serial
from tee_runner.protection.gelo.tiles import LANES, finite, require_dense_rows
from tee_runner.protection.integrity_kernels import CHUNK
from tee_runner.simd import I64, VECTOR, Emitter, emitted

# Operand rows for one data row: itself, n + 8, and HD3's next power of two.
SUMMED_ROWS = (1, 9, 16)
# Bytes ahead of what is read of each row of the answer that are asked for.
_AHEAD = 512


def _dot(rows: int, *, first: bool = True, last: bool = True, checked: bool = False) -> Any:
    """The dot product with ``rows`` rows over many columns; ``checked``: and the sums of each against two
    vectors.

    The first of several parts leaves its share of the dot product in ``out``; the others add their own,
    the last scales and checks that it is finite. Each float of the answer is loaded once and used for all.
    ``sums`` gets ``2 · rows`` vectors of partial sums, the two of a row one after the other.
    """

    def emit(
        e: Emitter, result: Any, stride: Any, weights: Any, out: Any, end: Any, factor: Any, flags: Any,
        *check: Any,
    ) -> None:  # fmt: skip
        builder = e.builder
        spread = [e.spread(e.offset(weights, i, 4)) for i in range(rows)]
        scale = e.spread(factor)
        entry = builder.block
        loop = builder.function.append_basic_block("columns")
        done = builder.function.append_basic_block("columns_done")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(I64)
        at.add_incoming(I64(0), entry)
        totals = [builder.phi(VECTOR) for _ in range(2 * rows if checked else 0)]
        state = builder.phi(VECTOR)
        for total in (*totals, state):
            total.add_incoming(e.constant(0.0), entry)
        probes = [e.load(builder.add(v, at)) for v in check[:2]]
        place = builder.add(out, at)
        dot = e.constant(0.0) if first else e.load(place)
        updated = []
        for i in range(rows):
            address = builder.add(e.offset(result, i, stride), at)
            e.prefetch(builder.add(address, I64(_AHEAD)), level=1)
            value = e.load(address)
            dot = e.fma(value, spread[i], dot)
            updated += [e.fma(value, probe, totals[2 * i + p]) for p, probe in enumerate(probes)]
        if last:
            dot = builder.fmul(dot, scale)
        e.store(dot, place)
        # As in Emitter.check.
        noted = e.fma(dot, e.constant(0.0), state)
        following = builder.add(at, I64(4 * LANES))
        at.add_incoming(following, loop)
        for total, value in zip((*totals, state), (*updated, noted), strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
        builder.position_at_end(done)
        for i, value in enumerate(updated):
            e.store(value, builder.add(check[2], I64(4 * LANES * i)))
        e.store(builder.fadd(e.load(flags), noted), flags)

    return emitted(10 if checked else 7, emit)


_first_8, _last_8 = _dot(8, last=False, checked=True), _dot(8, first=False, checked=True)
_all_1, _all_9 = _dot(1, checked=True), _dot(9, checked=True)
_alone_1, _alone_9, _alone_16 = _dot(1), _dot(9), _dot(16)


@numba.njit(nogil=True, cache=True)
def _send(operand: Any, sent: Any) -> None:
    """Copy, if there are two of them."""
    if operand.ctypes.data == sent.ctypes.data:
        return
    for i in range(operand.shape[0]):
        for c in range(operand.shape[1]):
            sent[i, c] = operand[i, c]


@numba.njit(nogil=True, cache=True)
def send_plain(row: Any, operand: Any, sent: Any) -> float:
    """Write ``operand = sent = f16(row · own scale)``; returns what undoes the scale."""
    scales = np.empty(1, np.float32)
    row_scales(row, scales)
    to_half_serial(row, scales, operand)
    _send(operand, sent)
    return 1.0 / scales[0]


@numba.njit(nogil=True, cache=True)
def send_dense(rows: Any, normals: Any, mask: Any, operand: Any, sent: Any, scratch: Any) -> float:
    """Write ``operand = sent = f16(scale · mask · [row · own scale; σ · normals])``.

    ``mask`` and ``scratch`` as for :func:`dense_apply`. Returns what undoes both scales on the way back.
    """
    scales = np.empty(1, np.float32)
    sigma, scale = block_scales(rows, scales, operand.shape[0] - 1)
    dense_apply(rows, scales, normals, np.float32(sigma), mask, np.float32(scale), operand, scratch)
    _send(operand, sent)
    return 1.0 / (scale * scales[0])


@numba.njit(nogil=True, cache=True)
def send_hd3(rows: Any, normals: Any, signs: Any, operand: Any, sent: Any) -> float:
    """:func:`send_dense` for HD3's ``signs`` (3, 16); what undoes the scales undoes half the norm of A, too.

    The other half is that of the inverse's row, likewise not normalised.
    """
    scales, none = np.empty(1, np.float32), np.empty(0, np.float32)
    sigma, scale = block_scales(rows, scales, operand.shape[0] - 1)
    normal = float(operand.shape[0]) ** -1.5
    hd3_apply(rows, scales, normals, np.float32(sigma), signs, np.float32(scale * normal), operand, none)
    _send(operand, sent)
    return normal / (scale * scales[0])


@numba.njit(nogil=True, cache=True)
def _add_totals(parts: Any, rows: int, top: int, sums: Any) -> None:
    for i in range(rows):
        for p in range(2):
            total = np.float32(0.0)
            for x in parts[2 * i + p]:
                total += x
            sums[top + i, p] += np.float64(total)


@numba.njit(nogil=True, cache=True)
def row_back(result: Any, inverse_row: Any, factor: Any, out: Any, v: Any, sums: Any) -> bool:
    """``out = inverse_row · result · factor`` and ``sums = result · vᵀ``; True if not finite.

    ``result`` (s, d) f32, s of :data:`SUMMED_ROWS`, d a multiple of 16; ``inverse_row`` (s,) f32;
    ``out`` (1, d) f32; ``v`` (2, d) f32; ``sums`` (s, 2) f64.
    """
    factors = np.full(1, factor, np.float32)
    require_dense_rows(result)
    require_dense_rows(out)
    flags, parts = np.zeros(LANES, np.float32), np.empty((18, LANES), np.float32)
    weights, stride, d = inverse_row.ctypes.data, result.strides[0], result.shape[1]
    sums[:] = 0.0
    for first in range(0, d, CHUNK):
        length = min(CHUNK, d - first) * 4
        at, to = result.ctypes.data + first * 4, out.ctypes.data + first * 4
        v0, v1 = v.ctypes.data + first * 4, v.ctypes.data + v.strides[0] + first * 4
        rest = (to, length, factors.ctypes.data, flags.ctypes.data, v0, v1, parts.ctypes.data)
        if result.shape[0] == 1:
            _all_1((at, stride, weights, *rest))
            _add_totals(parts, 1, 0, sums)
        elif result.shape[0] == 9:
            _all_9((at, stride, weights, *rest))
            _add_totals(parts, 9, 0, sums)
        else:
            _first_8((at, stride, weights, *rest))
            _add_totals(parts, 8, 0, sums)
            _last_8((at + 8 * stride, stride, weights + 32, *rest))
            _add_totals(parts, 8, 8, sums)
    return not finite(flags)


@numba.njit(nogil=True, cache=True)
def row_alone(result: Any, inverse_row: Any, factor: Any, out: Any) -> bool:
    """:func:`row_back` without sums."""
    factors = np.full(1, factor, np.float32)
    require_dense_rows(result)
    require_dense_rows(out)
    flags = np.zeros(LANES, np.float32)
    arguments = (
        result.ctypes.data, result.strides[0], inverse_row.ctypes.data, out.ctypes.data,
        result.shape[1] * 4, factors.ctypes.data, flags.ctypes.data,
    )  # fmt: skip
    if result.shape[0] == 1:
        _alone_1(arguments)
    elif result.shape[0] == 9:
        _alone_9(arguments)
    else:
        _alone_16(arguments)
    return not finite(flags)
