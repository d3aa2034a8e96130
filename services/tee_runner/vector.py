"""Vector building blocks of the runner's kernels.

Bit casts, branch-free exp and Gaussian pairs that loops vectorise, Walsh–Hadamard butterflies,
and a register-tiled matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_PTR = ir.PointerType()
_VECTOR = ir.VectorType(_F32, LANES)


@intrinsic
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 with these uint32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_from_float(typing_context: Any, value: Any) -> Any:
    """The uint32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), codegen


def _butterfly(radix: int) -> Any:
    """An intrinsic: the unnormalised Walsh–Hadamard transform of ``radix`` vectors of 16 floats.

    Vector i lives at ``address + i * stride`` (bytes). Everything stays in registers between
    the loads and the stores.
    """

    @intrinsic
    def butterfly(typing_context: Any, address: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base, step = arguments
            places = []
            for i in range(radix):
                place = builder.add(base, builder.mul(_I64(i), step))
                places.append(builder.inttoptr(place, _PTR))
            values = []
            for place in places:
                load = builder.load(place, typ=_VECTOR)
                load.align = 4
                values.append(load)
            span = 1
            while span < radix:
                for start in range(0, radix, 2 * span):
                    for i in range(start, start + span):
                        a, b = values[i], values[i + span]
                        values[i], values[i + span] = builder.fadd(a, b), builder.fsub(a, b)
                span *= 2
            for place, value in zip(places, values, strict=True):
                builder.store(value, place).align = 4
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return butterfly


_butterfly2, _butterfly4, _butterfly8, _butterfly16 = (_butterfly(r) for r in (2, 4, 8, 16))


@numba.njit(nogil=True, cache=True)
def walsh_hadamard(address: int, rows: int, width: int) -> None:
    """In-place unnormalised WHT down the columns of a float32 tile ``(rows, width)``.

    ``rows`` is a power of two, ``width`` a multiple of 16; the tile is contiguous. Stages are
    fused by up to 16 rows so that a tile is read and written log2(rows) / 4 times.
    """
    row = width * 4
    span = 1
    while span < rows:
        left = rows // span
        radix = 16 if left == 16 or left >= 256 else 8 if left >= 8 else left
        step = span * row
        for start in range(0, rows, span * radix):
            for i in range(start, start + span):
                for column in range(0, width, 16):
                    at = address + i * row + column * 4
                    if radix == 16:
                        _butterfly16(at, step)
                    elif radix == 8:
                        _butterfly8(at, step)
                    elif radix == 4:
                        _butterfly4(at, step)
                    else:
                        _butterfly2(at, step)
        span *= radix


# float32 constants: a Python float would pull the arithmetic up to float64.
_TWO_M32 = np.float32(2.0**-32)
_TWO_M33 = np.float32(2.0**-33)
_TWO_M31 = np.float32(2.0**-31)
_BELOW_ONE = np.float32(1.0 - 2.0**-24)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_MINUS_TWO = np.float32(-2.0)
_SQRT2 = np.float32(math.sqrt(2.0))
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Cephes logf: ln(1 + x) = x - x²/2 + x³·P(x) on [1/√2 - 1, √2 - 1], error below 1 ulp.
_P0, _P1, _P2 = np.float32(7.0376836292e-2), np.float32(-1.1514610310e-1), np.float32(1.1676998740e-1)
_P3, _P4, _P5 = np.float32(-1.2420140846e-1), np.float32(1.4249322787e-1), np.float32(-1.6668057665e-1)
_P6, _P7, _P8 = np.float32(2.0000714765e-1), np.float32(-2.4999993993e-1), np.float32(3.3333331174e-1)
# sin(πy) = y·S(y²) on [-1/2, 1/2]: the Taylor series to y¹³, remainder below 1e-9.
_S0, _S1, _S2, _S3, _S4, _S5, _S6 = (
    np.float32((-1) ** i * math.pi ** (2 * i + 1) / math.factorial(2 * i + 1)) for i in range(7)
)


@numba.njit(nogil=True, cache=True, inline="always")
def _log(x: Any) -> Any:
    """ln of a positive normal float32; branch-free so that loops over it vectorise."""
    bits = bits_from_float(x)
    exponent = np.float32(np.int32(bits >> np.uint32(23)) - np.int32(127))
    m = float_from_bits((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000))
    large = m > _SQRT2
    m = m * _HALF if large else m
    exponent = exponent + _ONE if large else exponent
    f = m - _ONE
    z = f * f
    y = (((((((_P0 * f + _P1) * f + _P2) * f + _P3) * f + _P4) * f + _P5) * f + _P6) * f + _P7) * f + _P8
    y = y * f * z + _LN2_LOW * exponent - _HALF * z
    return f + y + _LN2_HIGH * exponent


@numba.njit(nogil=True, cache=True, inline="always")
def _sin_pi(y: Any) -> Any:
    z = y * y
    return y * ((((((_S6 * z + _S5) * z + _S4) * z + _S3) * z + _S2) * z + _S1) * z + _S0)


@numba.njit(nogil=True, cache=True, inline="always")
def gaussian_pair(first: Any, second: Any) -> Any:
    """Two independent standard normals (float32) from two uniform uint32 words.

    Box–Muller, which is exact up to the rounding of u to multiples of 2⁻³² (the tail ends at
    6.7 σ) and of the result to float32.
    """
    u = np.float32(first) * _TWO_M32 + _TWO_M33
    u = min(u, _BELOW_ONE)
    radius = np.sqrt(_MINUS_TWO * _log(u))
    t = np.float32(np.int32(second)) * _TWO_M31
    a = abs(t)
    cosine = _sin_pi(_HALF - a)
    b = min(a, _ONE - a)
    sine = _sin_pi(b if t >= np.float32(0.0) else -b)
    return radius * cosine, radius * sine


_LOG2E = np.float32(1.4426950408889634)
# Cephes expf: e^r on [-ln2/2, ln2/2].
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_EXP_LOW, _EXP_HIGH = np.float32(-87.0), np.float32(88.0)


@numba.njit(nogil=True, cache=True, inline="always")
def exp(x: Any) -> Any:
    """e^x in float32, relative error below 2e-7; clamped to the normal range, branch-free."""
    x = min(max(x, _EXP_LOW), _EXP_HIGH)
    k = np.floor(x * _LOG2E + _HALF)
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    y = (((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5) * r * r + r + _ONE
    return y * float_from_bits(np.uint32(np.int32(k) + np.int32(127)) << np.uint32(23))


_TWO = np.float32(2.0)
_SMALL_TANH = np.float32(0.625)
# Cephes tanhf below 0.625: x + x³·P(x²).
_T0, _T1, _T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
_T3, _T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)


@numba.njit(nogil=True, cache=True, inline="always")
def tanh(x: Any) -> Any:
    """Hyperbolic tangent in float32, relative error below 4e-7; branch-free."""
    z = x * x
    near = x + x * z * ((((_T0 * z + _T1) * z + _T2) * z + _T3) * z + _T4)
    size = abs(x)
    far = _ONE - _TWO / (exp(size + size) + _ONE)
    return near if size < _SMALL_TANH else (far if x > np.float32(0.0) else -far)


def _matmul_tile(rows: int, vectors: int) -> Any:
    """An intrinsic: a ``rows`` x ``16·vectors`` block of C += A·B, kept in registers.

    Addresses and strides in bytes; A row-major, B depth-major (row k is contiguous);
    the depth is at least 1.
    """

    @intrinsic
    def tile(
        typing_context: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, c: Any,
        c_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_stride, b, b_stride, depth, c, c_stride = arguments
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
            )

            def place(base: Any, stride: Any, row: Any, column: int) -> Any:
                address = builder.add(base, builder.mul(row, stride))
                return builder.inttoptr(builder.add(address, _I64(column * 4)), _PTR)

            def load(pointer: Any) -> Any:
                value = builder.load(pointer, typ=_VECTOR)
                value.align = 4
                return value

            grid = [(r, v) for r in range(rows) for v in range(vectors)]
            targets = {(r, v): place(c, c_stride, _I64(r), v * LANES) for r, v in grid}
            initial = {key: load(pointer) for key, pointer in targets.items()}
            entry = builder.block
            loop = builder.function.append_basic_block("tile")
            done = builder.function.append_basic_block("tile_done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_I64)
            k.add_incoming(_I64(0), entry)
            sums = {key: builder.phi(_VECTOR) for key in grid}
            bs = [load(place(b, b_stride, k, v * LANES)) for v in range(vectors)]
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            splat = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
            updated = {}
            for r in range(rows):
                row = builder.add(a, builder.mul(_I64(r), a_stride))
                pointer = builder.inttoptr(builder.add(row, builder.mul(k, _I64(4))), _PTR)
                scalar = builder.load(pointer, typ=_F32)
                spread = builder.shuffle_vector(
                    builder.insert_element(undefined, scalar, _I32(0)), undefined, splat
                )
                for v in range(vectors):
                    updated[r, v] = builder.call(fma, [spread, bs[v], sums[r, v]])
            following = builder.add(k, _I64(1))
            k.add_incoming(following, loop)
            for key in grid:
                sums[key].add_incoming(initial[key], entry)
                sums[key].add_incoming(updated[key], loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
            builder.position_at_end(done)
            for key in grid:
                builder.store(updated[key], targets[key]).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


_tile_4x4, _tile_4x1 = _matmul_tile(4, 4), _matmul_tile(4, 1)


@numba.njit(nogil=True, cache=True)
def matmul_add(
    a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int, rows: int, depth: int,
    columns: int,
) -> None:  # fmt: skip
    """C += A·B in float32; strides in floats.

    ``rows`` is a multiple of 4, ``columns`` of 16, ``depth`` at least 1.
    """
    for r in range(0, rows, 4):
        at = a + r * a_stride * 4
        to = c + r * c_stride * 4
        column = 0
        while column + 64 <= columns:
            _tile_4x4(at, a_stride * 4, b + column * 4, b_stride * 4, depth, to + column * 4, c_stride * 4)
            column += 64
        while column < columns:
            _tile_4x1(at, a_stride * 4, b + column * 4, b_stride * 4, depth, to + column * 4, c_stride * 4)
            column += 16
