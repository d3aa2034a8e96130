"""Which processor a thread runs on, and moving it to another, as numba primitives. Linux only."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Words of a set of processors: 8192 of them, the most that Linux is built for.
SET_WORDS = 128

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_PTR = ir.PointerType()


@intrinsic
def current_processor(typing_context: Any) -> Any:
    """``sched_getcpu(3)``; takes some nanoseconds."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_getcpu")
        return builder.sext(builder.call(function, []), _I64)

    return types.int64(), codegen


def _affinity(name: str) -> Any:
    """An intrinsic: the C function on the calling thread; takes the address of :data:`SET_WORDS` words."""

    @intrinsic
    def call(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_I32, [_I32, _I64, _PTR]), name
            )
            place = builder.inttoptr(arguments[0], _PTR)
            return builder.sext(builder.call(function, [_I32(0), _I64(8 * SET_WORDS), place]), _I64)

        return types.int64(types.int64), codegen

    return call


_get_affinity, _set_affinity = _affinity("sched_getaffinity"), _affinity("sched_setaffinity")


@numba.njit(nogil=True, cache=True)
def move_off(taken: Any) -> bool:
    """Move the calling thread to a processor that is none of ``taken`` ``(n,)`` int64.

    Which processors it may use stays as it was. False if it may use no other.
    """
    allowed = np.zeros(SET_WORDS, np.uint64)
    if _get_affinity(allowed.ctypes.data) != 0:
        return False
    others = allowed.copy()
    for processor in taken:
        if 0 <= processor < 64 * SET_WORDS:
            others[processor // 64] &= ~(np.uint64(1) << np.uint64(processor % 64))
    if not others.any() or _set_affinity(others.ctypes.data) != 0:
        return False
    return bool(_set_affinity(allowed.ctypes.data) == 0)
