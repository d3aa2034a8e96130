"""IEEE half precision, the wire's operand format, inside numba kernels.

numba has no float16 arrays on the CPU, so kernels see operands as uint16 and convert with
these two, which LLVM vectorises (F16C or AVX-512).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_HALF = ir.HalfType()
_FLOAT = ir.FloatType()
_I16 = ir.IntType(16)


@intrinsic
def half_to_float(typing_context: Any, bits: Any) -> Any:
    """The float32 value of a float16 given as uint16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALF), _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typing_context: Any, value: Any) -> Any:
    """The uint16 bits of a float32 rounded to float16, ties to even; out of range is infinity."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _HALF), _I16)

    return types.uint16(types.float32), codegen
