"""Emission of vector code for kernels: what LLVM's own vectoriser does not find.

An :class:`Emitter` wraps the LLVM builder inside a numba intrinsic. Vectors hold 16 float32,
one register where the processor has AVX-512 and two or four elsewhere. Addresses and offsets
are integers in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tee_runner.memory import LINE

LANES = 16
F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
POINTER = ir.PointerType()
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)


class Emitter:
    """Arithmetic on vectors of 16 float32 as LLVM instructions."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self._fma = self._function("llvm.fma.v16f32", 3)

    def _function(self, name: str, arguments: int) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR] * arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, name)

    def offset(self, address: Any, index: int, step: Any) -> Any:
        """``address + index · step``."""
        step = I64(step) if isinstance(step, int) else step
        return self.builder.add(address, self.builder.mul(I64(index), step))

    def pointer(self, address: Any) -> Any:
        """An address as a pointer."""
        return self.builder.inttoptr(address, POINTER)

    def load(self, address: Any, kind: Any = VECTOR, align: int = 4) -> Any:
        """A value at any element-aligned address."""
        value = self.builder.load(self.pointer(address), typ=kind)
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4, *, past: bool = False) -> None:
        """Write to any element-aligned address.

        ``past`` writes past the caches, what is too large to be found there again: such lines are not read
        first. It is a vector of 64 bytes on a line, and others see it after a fence only.
        """
        written = self.builder.store(value, self.pointer(address))
        written.align = align
        if past:
            written.align = LINE
            written.set_metadata("nontemporal", self.builder.module.add_metadata([I32(1)]))

    def store_half(self, value: Any, address: Any) -> None:
        """Round to float16, ties to even, and write 16 of them."""
        self.store(self.builder.fptrunc(value, HALVES), address, 2)

    def prefetch(self, address: Any, *, write: bool = False, level: int = 2) -> None:
        """Ask for the line at ``address``, into the cache of ``level`` and up; harmless at any address.

        ``write``: it is about to be written.
        """
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.pointer(address), I32(int(write)), I32(4 - level), I32(1)])

    def splat(self, scalar: Any) -> Any:
        """16 copies of a float32."""
        undefined = ir.Constant(VECTOR, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))

    def splat_integer(self, scalar: Any) -> Any:
        """16 copies of an int32."""
        undefined = ir.Constant(INTEGERS, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))

    def spread(self, address: Any) -> Any:
        """16 copies of the float32 at ``address``."""
        return self.splat(self.load(address, F32))

    def constant(self, value: float) -> Any:
        """16 copies of a constant."""
        return ir.Constant(VECTOR, [float(value)] * LANES)

    def integer(self, value: int) -> Any:
        """16 copies of an int32 constant."""
        return ir.Constant(INTEGERS, [value] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a·b + c, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def sqrt(self, a: Any) -> Any:
        """Correctly rounded square root."""
        return self.builder.call(self._function("llvm.sqrt.v16f32", 1), [a])

    def magnitude(self, a: Any) -> Any:
        """Absolute value."""
        return self.builder.call(self._function("llvm.fabs.v16f32", 1), [a])

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller of two numbers, neither a NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """Horner's rule, highest power first."""
        value = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.fma(value, x, self.constant(coefficient))
        return value

    def walsh_hadamard(self, values: Sequence[Any], span: int = 1) -> list[Any]:
        """The unnormalised transform of a power of two of vectors, from the stage ``span`` on."""
        out = list(values)
        while span < len(out):
            for start in range(0, len(out), 2 * span):
                for i in range(start, start + span):
                    a, b = out[i], out[i + span]
                    out[i], out[i + span] = self.builder.fadd(a, b), self.builder.fsub(a, b)
            span *= 2
        return out

    def signed_walsh_hadamard(self, values: Sequence[Any], signs: Any, step: Any) -> list[Any]:
        """The transform of vectors times scalars ±1 at ``signs + i · step``; the flips are fused."""
        out = []
        for i in range(0, len(values), 2):
            a = self.builder.fmul(values[i], self.spread(self.offset(signs, i, step)))
            b, sign = values[i + 1], self.spread(self.offset(signs, i + 1, step))
            out += [self.fma(b, sign, a), self.fma(self.builder.fneg(b), sign, a)]
        return self.walsh_hadamard(out, 2)

    def check(self, values: Sequence[Any], flags: Any) -> None:
        """Turn lanes of the vector at ``flags`` into NaN where one of ``values`` is not finite."""
        # 0·x is NaN for infinities and NaN, and 0 + NaN stays.
        state = self.load(flags)
        for value in values:
            state = self.fma(value, self.constant(0.0), state)
        self.store(state, flags)


def emitted(count: int, emit: Callable[..., None]) -> Any:
    """An intrinsic that takes one tuple of ``count`` int64.

    ``emit(emitter, *values)`` writes its body.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(Emitter(builder), *cgutils.unpack_tuple(builder, arguments[0], count))
        return context.get_dummy_value()

    signature = types.void(types.UniTuple(types.int64, count))
    return intrinsic(lambda typing_context, values: (signature, codegen))


# The constants of vector.gaussian_pair: Cephes logf, and the Taylor series of sin(πy).
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SIN = tuple((-1) ** i * math.pi ** (2 * i + 1) / math.factorial(2 * i + 1) for i in range(6, -1, -1))


def _log(e: Emitter, x: Any) -> Any:
    """ln of positive normal numbers; error below 1 ulp."""
    builder = e.builder
    # Exponent and mantissa of x/√½ on the bits, so that the mantissa is in [√½, √2).
    bits = builder.sub(builder.bitcast(x, INTEGERS), e.integer(0x3F3504F3))
    exponent = builder.sitofp(builder.ashr(bits, e.integer(23)), VECTOR)
    mantissa = builder.add(builder.and_(bits, e.integer(0x7FFFFF)), e.integer(0x3F3504F3))
    f = builder.fsub(builder.bitcast(mantissa, VECTOR), e.constant(1.0))
    z = builder.fmul(f, f)
    y = builder.fmul(builder.fmul(e.polynomial(f, _LOG), f), z)
    y = e.fma(exponent, e.constant(-2.12194440e-4), y)
    y = e.fma(z, e.constant(-0.5), y)
    return e.fma(exponent, e.constant(0.693359375), builder.fadd(f, y))


def _sin_pi(e: Emitter, y: Any) -> Any:
    return e.builder.fmul(y, e.polynomial(e.builder.fmul(y, y), _SIN))


def _gaussian_pairs(e: Emitter, first: Any, second: Any, cosine: Any, sine: Any) -> None:
    """:func:`tee_runner.vector.gaussian_pair` of 16 pairs of words, to its accuracy."""
    builder = e.builder
    u = builder.uitofp(e.load(first, INTEGERS), VECTOR)
    u = e.minimum(e.fma(u, e.constant(2.0**-32), e.constant(2.0**-33)), e.constant(1.0 - 2.0**-24))
    radius = e.sqrt(builder.fmul(e.constant(-2.0), _log(e, u)))
    t = builder.fmul(builder.sitofp(e.load(second, INTEGERS), VECTOR), e.constant(2.0**-31))
    a = e.magnitude(t)
    e.store(builder.fmul(radius, _sin_pi(e, builder.fsub(e.constant(0.5), a))), cosine)
    b = e.minimum(a, builder.fsub(e.constant(1.0), a))
    # sin is odd: the sign of t goes into the result.
    sign = builder.and_(builder.bitcast(t, INTEGERS), e.integer(-(2**31)))
    b = builder.bitcast(builder.or_(builder.bitcast(b, INTEGERS), sign), VECTOR)
    e.store(builder.fmul(radius, _sin_pi(e, b)), sine)


_pairs16 = emitted(4, _gaussian_pairs)


@numba.njit(nogil=True, cache=True)
def gaussian_pairs(first: int, second: int, cosine: int, sine: int, count: int) -> None:
    """``count`` Box–Muller pairs, a multiple of 16; four addresses of 32-bit elements."""
    for i in range(0, count * 4, LANES * 4):
        _pairs16((first + i, second + i, cosine + i, sine + i))


def _pointer_to(kind: Any) -> Any:
    """An intrinsic: an address as a pointer to ``kind``, for :func:`numba.carray`."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


half_pointer, float_pointer = _pointer_to(types.uint16), _pointer_to(types.float32)
