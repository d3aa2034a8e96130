"""Atomic words in shared memory, and giving the core away, as numba primitives.

Addresses are plain integers (``array.ctypes.data``): the words live in memory that another
process or thread writes, which numba's arrays cannot express.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """The int64 at ``address``, sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Store int64 ``value`` at ``address``, sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add ``value`` to the int64 at ``address``; returns what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def plain_load(typing_context: Any, address: Any) -> Any:
    """The int64 at ``address``, read once, ordered by the atomic accesses around it only."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "monotonic", 8)

    return types.int64(types.int64), codegen


@intrinsic
def plain_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Store int64 ``value`` at ``address``, ordered by the atomic accesses around it only."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "monotonic", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def monotonic_ns(typing_context: Any) -> Any:
    """``CLOCK_MONOTONIC`` in nanoseconds, the clock of ``time.perf_counter_ns``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.ArrayType(_I64, 2)
        with builder.goto_entry_block():
            moment = builder.alloca(kind)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_I32, [_I32, moment.type]), "clock_gettime"
        )
        builder.call(function, [_I32(1), moment])
        place = builder.ptrtoint(moment, _I64)
        seconds = builder.load(_pointer(builder, place), typ=_I64)
        rest = builder.load(_pointer(builder, builder.add(place, _I64(8))), typ=_I64)
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def yield_cpu(typing_context: Any) -> Any:
    """``sched_yield(2)``: lets a thread that has work use this core."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    """``syscall(SYS_futex, address, operation, value, NULL)``; errors mean "look again"."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_I64, [_I64], var_arg=True), "syscall"
    )
    builder.call(function, [_I64(_SYS_FUTEX), address, _I64(operation), value, _I64(0)])


@intrinsic
def futex_wait(typing_context: Any, address: Any, value: Any) -> Any:
    """Sleep while the low 32 bits at ``address`` equal ``value``; may return early."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _FUTEX_WAIT_PRIVATE, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def futex_wake(typing_context: Any, address: Any, count: Any) -> Any:
    """Wake up to ``count`` threads that sleep on ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, arguments[0], _FUTEX_WAKE_PRIVATE, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _compiled(function: Callable[..., Any]) -> Any:
    return numba.njit(nogil=True, cache=True)(function)


@_compiled
def load_word(address: int) -> int:
    """The int64 at ``address``."""
    return atomic_load(address)


@_compiled
def store_word(address: int, value: int) -> None:
    """Store int64 ``value`` at ``address``."""
    atomic_store(address, value)
