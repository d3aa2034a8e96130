"""The passes of the HD3 cascade as LLVM code: up to 16 rows of 16 columns in registers.

Every one of them works on one vector of 16 columns of ``radix`` rows; loops are in
:mod:`tee_runner.protection.gelo.hd3_kernels`. Arguments are addresses and strides in bytes.
"""

from __future__ import annotations

from typing import Any

from tee_runner.simd import I64, LANES, Emitter, emitted


def _sources(
    e: Emitter, radix: int, addresses: Any, multipliers: Any, offset: Any, ahead: Any = None
) -> list[Any]:
    values = []
    for i in range(radix):
        address = e.builder.add(e.load(e.offset(addresses, i, 8), I64, 8), offset)
        value = e.load(address)
        if ahead is not None:
            e.prefetch(e.builder.add(address, ahead))
        values.append(e.builder.fmul(value, e.spread(e.offset(multipliers, i, 4))))
    return values


def _load(e: Emitter, radix: int, tile: Any, step: Any) -> list[Any]:
    return [e.load(e.offset(tile, i, step)) for i in range(radix)]


def _store(e: Emitter, values: list[Any], tile: Any, step: Any) -> None:
    for i, value in enumerate(values):
        e.store(value, e.offset(tile, i, step))


def _halves(
    e: Emitter, values: list[Any], factors: Any, span: Any, out: Any, stride: Any, ahead: Any = None
) -> None:
    """``factors`` and ``out`` belong to the first row; the others are ``span`` rows apart."""
    places = [e.offset(out, i, e.builder.mul(span, stride)) for i in range(len(values))]
    if ahead is not None:
        for place in places:
            e.prefetch(e.builder.add(place, ahead), write=True)
    for i, (value, place) in enumerate(zip(values, places, strict=True)):
        factor = e.spread(e.offset(factors, i, e.builder.mul(span, I64(4))))
        e.store_half(e.builder.fmul(value, factor), place)


def _rows(
    e: Emitter, values: list[Any], row: Any, span: Any, n: Any, factors: Any, out: Any, stride: Any,
    flags: Any, ahead: Any = None, *, past: bool = False,
) -> None:  # fmt: skip
    """``row`` is the first of them; ``factors`` and ``out`` belong to row 0. Only rows below n.

    Factors of the other rows are 0: what is not finite there shows as well.
    """
    builder = e.builder
    places = [builder.add(row, builder.mul(span, I64(i))) for i in range(len(values))]
    if ahead is not None:
        for place in places:
            e.prefetch(builder.add(builder.add(out, builder.mul(place, stride)), ahead), write=True)
    scaled = []
    for value, place in zip(values, places, strict=True):
        scaled.append(builder.fmul(value, e.spread(builder.add(factors, builder.mul(place, I64(4))))))
    e.check(scaled, flags)
    for value, place in zip(scaled, places, strict=True):
        with builder.if_then(builder.icmp_signed("<", place, n)):
            e.store(value, builder.add(out, builder.mul(place, stride)), past=past)


def _first(radix: int) -> Any:
    def emit(
        e: Emitter, addresses: Any, multipliers: Any, offset: Any, tile: Any, step: Any, ahead: Any
    ) -> None:
        values = _sources(e, radix, addresses, multipliers, offset, ahead)
        _store(e, e.walsh_hadamard(values), tile, step)

    return emitted(6, emit)


def _single(radix: int) -> Any:
    def emit(e: Emitter, tile: Any, step: Any) -> None:
        _store(e, e.walsh_hadamard(_load(e, radix, tile, step)), tile, step)

    return emitted(2, emit)


def _double(radix: int) -> Any:
    def emit(e: Emitter, tile: Any, step: Any, signs: Any, sign_step: Any) -> None:
        values = e.walsh_hadamard(_load(e, radix, tile, step))
        _store(e, e.signed_walsh_hadamard(values, signs, sign_step), tile, step)

    return emitted(4, emit)


def _last_half(radix: int) -> Any:
    def emit(e: Emitter, tile: Any, step: Any, *sink: Any) -> None:
        _halves(e, e.walsh_hadamard(_load(e, radix, tile, step)), *sink)

    return emitted(7, emit)


def _last_rows(radix: int, *, past: bool = False) -> Any:
    def emit(e: Emitter, tile: Any, step: Any, *sink: Any) -> None:
        _rows(e, e.walsh_hadamard(_load(e, radix, tile, step)), *sink, past=past)

    return emitted(9 if past else 10, emit)


def _cascade(e: Emitter, addresses: Any, multipliers: Any, offset: Any, first: Any, second: Any) -> list[Any]:
    values = e.walsh_hadamard(_sources(e, LANES, addresses, multipliers, offset))
    values = e.signed_walsh_hadamard(values, first, 4)
    return e.signed_walsh_hadamard(values, second, 4)


def _cascade_half(
    e: Emitter, addresses: Any, multipliers: Any, offset: Any, first: Any, second: Any, factors: Any,
    out: Any, stride: Any,
) -> None:  # fmt: skip
    values = _cascade(e, addresses, multipliers, offset, first, second)
    _halves(e, values, factors, I64(1), out, stride)


def _cascade_rows(
    e: Emitter, addresses: Any, multipliers: Any, offset: Any, first: Any, second: Any, n: Any,
    factors: Any, out: Any, stride: Any, flags: Any,
) -> None:  # fmt: skip
    values = _cascade(e, addresses, multipliers, offset, first, second)
    _rows(e, values, I64(0), I64(1), n, factors, out, stride, flags)


first8, first16 = _first(8), _first(16)
single4, single8, single16 = _single(4), _single(8), _single(16)
double4, double8, double16 = _double(4), _double(8), _double(16)
half4, half8, half16 = _last_half(4), _last_half(8), _last_half(16)
rows4, rows8, rows16 = _last_rows(4), _last_rows(8), _last_rows(16)
# What lies past the caches is not asked for ahead.
rows8_past, rows16_past = _last_rows(8, past=True), _last_rows(16, past=True)
cascade_half16, cascade_rows16 = emitted(8, _cascade_half), emitted(10, _cascade_rows)


def _dot_rows(n: int) -> Any:
    """n rows of Aᵀ times 16 rows of the answer, 16 columns."""

    def emit(
        e: Emitter, result: Any, stride: Any, weights: Any, factors: Any, out: Any, out_stride: Any,
        flags: Any,
    ) -> None:  # fmt: skip
        sums = [e.constant(0.0)] * n
        for i in range(LANES):
            value = e.load(e.offset(result, i, stride))
            for r in range(n):
                sums[r] = e.fma(value, e.spread(e.builder.add(weights, I64((r * LANES + i) * 4))), sums[r])
        scaled = [e.builder.fmul(sums[r], e.spread(e.offset(factors, r, 4))) for r in range(n)]
        e.check(scaled, flags)
        for r in range(n):
            e.store(scaled[r], e.offset(out, r, out_stride))

    return emitted(7, emit)


dot1, dot2 = _dot_rows(1), _dot_rows(2)
