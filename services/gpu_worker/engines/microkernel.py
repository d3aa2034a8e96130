"""The CPU engine's inner kernel: f32 rows times f16 column panels, in registers.

Weights are packed in *panels* of 16 output columns: ``panels[p, k, j]`` is weight
``(16 p + j, k)``, so that the kernel streams each panel once. A register tile of R rows by
P panels is emitted as LLVM vector code: per input index k it loads P vectors of 16 halves,
widens them, and issues R·P fused multiply-adds. BLAS has no kernel for few rows against
f16 weights; on the shapes of a decode step this is 3 to 5 times faster than OpenBLAS f32.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gelo.atomics import atomic_add, atomic_load
from gelo.f16 import half_to_float

LANES = 16
# Bytes ahead of the current weight that are prefetched: hides DRAM latency at 5-10 GB/s a core.
_PREFETCH_BYTES = 4096

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_PTR = ir.PointerType()
_VECTOR = ir.VectorType(_F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _emit_tile(builder: Any, rows: int, panels: int, arguments: Any) -> None:
    """The loop over k for one register tile."""
    operand, operand_stride, weight, panel_stride, depth, out, out_stride = arguments
    module = builder.module
    fma = cgutils.get_or_insert_function(
        module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    prefetch = cgutils.get_or_insert_function(
        module, ir.FunctionType(ir.VoidType(), [_PTR, _I32, _I32, _I32]), "llvm.prefetch.p0"
    )
    entry = builder.block
    loop = builder.function.append_basic_block("tile")
    done = builder.function.append_basic_block("tile_done")
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(_I64)
    k.add_incoming(_I64(0), entry)
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    sums = [[builder.phi(_VECTOR) for _ in range(panels)] for _ in range(rows)]
    for row in sums:
        for total in row:
            total.add_incoming(zero, entry)
    weights = []
    for p in range(panels):
        address = builder.add(
            weight, builder.add(builder.mul(_I64(p), panel_stride), builder.mul(k, _I64(2 * LANES)))
        )
        ahead = builder.inttoptr(builder.add(address, _I64(_PREFETCH_BYTES)), _PTR)
        builder.call(prefetch, [ahead, _I32(0), _I32(3), _I32(1)])
        halves = builder.load(builder.inttoptr(address, _PTR), typ=_HALVES)
        halves.align = 2
        weights.append(builder.fpext(halves, _VECTOR))
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    splat = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    updated = []
    for r in range(rows):
        address = builder.add(
            operand, builder.add(builder.mul(_I64(r), operand_stride), builder.mul(k, _I64(4)))
        )
        value = builder.load(builder.inttoptr(address, _PTR), typ=_F32)
        broadcast = builder.shuffle_vector(
            builder.insert_element(undefined, value, _I32(0)), undefined, splat
        )
        updated.append([builder.call(fma, [broadcast, weights[p], sums[r][p]]) for p in range(panels)])
    following = builder.add(k, _I64(1))
    k.add_incoming(following, loop)
    for r in range(rows):
        for p in range(panels):
            sums[r][p].add_incoming(updated[r][p], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

    builder.position_at_end(done)
    for r in range(rows):
        for p in range(panels):
            address = builder.add(out, builder.add(builder.mul(_I64(r), out_stride), _I64(p * LANES * 4)))
            store = builder.store(updated[r][p], builder.inttoptr(address, _PTR))
            store.align = 4


def _tile(rows: int, panels: int) -> Any:
    @intrinsic
    def tile(
        typing_context: Any, operand: Any, operand_stride: Any, weight: Any, panel_stride: Any,
        depth: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile(builder, rows, panels, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


_tile_1x8, _tile_1x1 = _tile(1, 8), _tile(1, 1)
_tile_2x4, _tile_2x1 = _tile(2, 4), _tile(2, 1)
_tile_4x4, _tile_4x1 = _tile(4, 4), _tile(4, 1)
_tile_9x2, _tile_9x1 = _tile(9, 2), _tile(9, 1)
_tile_12x2, _tile_12x1 = _tile(12, 2), _tile(12, 1)
_tile_16x1 = _tile(16, 1)

ROW_TILES = (1, 2, 4, 9, 12, 16)


@numba.njit(nogil=True, cache=True)
def row_tile(rows: int) -> int:
    """Rows of the register tile used next when ``rows`` remain; may exceed ``rows`` (padding)."""
    if rows in (13, 14, 15, 16):
        return 16
    if rows >= 10:
        return 12
    if rows >= 5:
        return 9
    if rows >= 3:
        return 4
    return rows


@numba.njit(nogil=True, cache=True)
def padded_rows(rows: int) -> int:
    """Rows the operand scratch must have so that every tile reads inside it."""
    done = 0
    while done < rows:
        done += row_tile(rows - done)
    return done


@numba.njit(nogil=True, cache=True)
def _tile_columns(
    rows: int, operand: int, operand_stride: int, weight: int, depth: int, count: int, out: int,
    out_stride: int,
) -> None:  # fmt: skip
    """``count`` neighbouring panels for one row tile; addresses and strides in bytes."""
    panel = depth * 2 * LANES
    wide = 8 if rows == 1 else 4 if rows in (2, 4) else 1 if rows == 16 else 2
    p = 0
    while p < count:
        w = weight + p * panel
        o = out + p * LANES * 4
        full = p + wide <= count
        if rows == 1:
            if full:
                _tile_1x8(operand, operand_stride, w, panel, depth, o, out_stride)
            else:
                _tile_1x1(operand, operand_stride, w, panel, depth, o, out_stride)
        elif rows == 2:
            if full:
                _tile_2x4(operand, operand_stride, w, panel, depth, o, out_stride)
            else:
                _tile_2x1(operand, operand_stride, w, panel, depth, o, out_stride)
        elif rows == 4:
            if full:
                _tile_4x4(operand, operand_stride, w, panel, depth, o, out_stride)
            else:
                _tile_4x1(operand, operand_stride, w, panel, depth, o, out_stride)
        elif rows == 9:
            if full:
                _tile_9x2(operand, operand_stride, w, panel, depth, o, out_stride)
            else:
                _tile_9x1(operand, operand_stride, w, panel, depth, o, out_stride)
        elif rows == 12:
            if full:
                _tile_12x2(operand, operand_stride, w, panel, depth, o, out_stride)
            else:
                _tile_12x1(operand, operand_stride, w, panel, depth, o, out_stride)
        else:
            _tile_16x1(operand, operand_stride, w, panel, depth, o, out_stride)
        p += wide if full else 1


@numba.njit(nogil=True, cache=True)
def widen_operand(operand: Any, scratch: Any, rows: int, depth: int) -> None:
    """f16 bits ``(m, depth)`` from possibly shared memory to f32 ``scratch``, zeros right and below."""
    for r in range(rows):
        for k in range(depth):
            scratch[r, k] = half_to_float(operand[r, k])
        scratch[r, depth:] = 0.0
    for r in range(rows, scratch.shape[0]):
        scratch[r, :] = 0.0


# The job of a team: an int64 array, written by the leader before the ticket is published.
JOB_WORDS = 24
OPERAND, WEIGHT, DEPTH, OUT, ROWS, PANELS, CHUNK, OPERAND_STRIDE, OUT_STRIDE = range(9)
# Word 9 is the ticket (epoch << 32 | next chunk), 10 the chunk count (epoch << 32 | chunks),
# 11 the chunks done in this epoch, 12 counts sleeping helpers, 13 asks helpers to leave.
# 14 is the address of the function ``(job address, first panel, panels)`` for a chunk, 0 for
# the kernel in this module. It is an address so that only machines that have it compile it.
TICKET, CHUNKS, DONE, SLEEPING, STOP, KERNEL = range(9, 15)
# 16 is what helpers watch: the epoch of the current job. 17 is the size of the team.
CALL, SIZE = 16, 17
_MASK = 0xFFFFFFFF


@intrinsic
def _call_kernel(typing_context: Any, kernel: Any, base: Any, first: Any, count: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_I64] * 3).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@numba.njit(nogil=True, cache=True)
def work(job: Any, base: int) -> None:
    """Take chunks of the current job until none is left. Leader and helpers run the same code.

    A ticket and the chunk count carry the epoch, so that a helper that was descheduled with
    an old ticket cannot touch a newer job: its chunk is valid only if both epochs agree, and
    while it holds a valid chunk the leader waits, so the job cannot change under it.
    """
    while True:
        ticket = atomic_add(base + 8 * TICKET, 1)
        chunks = atomic_load(base + 8 * CHUNKS)
        index = ticket & _MASK
        if (ticket >> 32) != (chunks >> 32) or index >= (chunks & _MASK):
            return
        depth = job[DEPTH]
        first = index * job[CHUNK]
        count = min(job[CHUNK], job[PANELS] - first)
        done = 0
        if job[KERNEL]:
            _call_kernel(job[KERNEL], base, first, count)
            done = job[ROWS]
        while done < job[ROWS]:
            tile = row_tile(job[ROWS] - done)
            _tile_columns(
                tile,
                job[OPERAND] + done * job[OPERAND_STRIDE],
                job[OPERAND_STRIDE],
                job[WEIGHT] + first * depth * 2 * LANES,
                depth,
                count,
                job[OUT] + done * job[OUT_STRIDE] + first * LANES * 4,
                job[OUT_STRIDE],
            )
            done += tile
        atomic_add(base + 8 * DONE, 1)
