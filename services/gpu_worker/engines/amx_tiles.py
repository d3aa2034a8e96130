"""AMX tiles and the vector code around them, as numba primitives; see :mod:`gpu_worker.engines.amx`.

Addresses and strides are plain integers, in bytes. A weight is widened from panels ``[k][16
columns]`` of f16 to tiles ``[k / 2][16 columns][2]`` of bf16, for each panel hi and then lo.
Compiling anything in here but :func:`split_halves` and :func:`float_bits` needs AMX.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu_worker.engines.microkernel import LANES

STEP = 32  # input indices of one tile product: weights are padded to a multiple of it
PANELS = 4  # weights are padded to a multiple of it, too
TILE_ROWS = 16
TILE_BYTES = 1024
# Weights of one step as tiles: 4 panels by 16 rows or 2 panels by 32 rows are multiplied at a
# time, 4 accumulators either way, so that a product need not wait for the one before it.
SLOT_BYTES = PANELS * 2 * TILE_BYTES
TALL_SLOT_BYTES = SLOT_BYTES // 2
BLOCK_STEPS = 8  # steps that stay in tiles, 32 KiB of them, while more than 32 rows use them
SCRATCH_BYTES = BLOCK_STEPS * TALL_SLOT_BYTES

# Tiles 0 to 3 accumulate, the others hold parts of the operand and of weights.
_A, _W = (4, 5), (6, 7)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_PTR = ir.PointerType()
_VOID = ir.VoidType()
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(_I32, LANES)


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    signature = ir.FunctionType(_VOID, [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _pointer(builder: Any, address: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), _PTR)


def _load_tile(builder: Any, tile: int, address: Any, offset: int) -> None:
    """Load ``tile`` from 64-byte rows, one after another."""
    _call(builder, "llvm.x86.tileloadd64", [_I8(tile), _pointer(builder, address, offset), _I64(64)])


def _dot(builder: Any, total: int, rows: int, columns: int) -> None:
    _call(builder, "llvm.x86.tdpbf16ps", [_I8(total), _I8(rows), _I8(columns)])


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _emit_widen(builder: Any, planes: int, weight: Any, ahead: Any, target: Any, offset: int) -> None:
    """One panel's 32 input indices at ``weight`` into bf16 tiles at ``target + offset``."""
    for pair in range(STEP // 2):
        address = builder.add(weight, _I64(pair * 4 * LANES))
        prefetched = builder.inttoptr(builder.add(address, ahead), _PTR)
        _call(builder, "llvm.prefetch.p0", [prefetched, _I32(0), _I32(3), _I32(1)])
        whole, high = [], []
        for odd in range(2):
            halves = builder.load(_pointer(builder, address, odd * 2 * LANES), typ=_HALVES)
            halves.align = 2
            whole.append(builder.fpext(halves, _FLOATS))
            bits = builder.bitcast(whole[-1], _WORDS)
            high.append(builder.and_(bits, _words(0xFFFF0000)))
        parts = [high]
        if planes == 2:
            rests = [builder.fsub(whole[odd], builder.bitcast(high[odd], _FLOATS)) for odd in range(2)]
            parts.append([builder.bitcast(rest, _WORDS) for rest in rests])
        for plane, (even, odd) in enumerate(parts):
            joined = builder.or_(builder.lshr(even, _words(16)), odd)
            place = _pointer(builder, target, offset + plane * TILE_BYTES + pair * 64)
            builder.store(joined, place).align = 64


def _emit_products(builder: Any, planes: int, panels: range, tiles: Any, operand: Any, part: Any) -> None:
    """Add one step's products of ``panels`` with 16 rows to their accumulators."""
    if panels.start == 0:
        for row_part in range(2):
            _load_tile(builder, _A[row_part], builder.add(operand, builder.mul(part, _I64(row_part))), 0)
    for plane in range(planes):
        for panel in panels:
            _load_tile(builder, _W[panel & 1], tiles, (panel * 2 + plane) * TILE_BYTES)
        for source in _A:
            for panel in panels:
                _dot(builder, panel, source, _W[panel & 1])


def _emit_tall_products(
    builder: Any, planes: int, tiles: Any, operand: Any, part: Any, tile_row: Any
) -> None:
    """Add one step's products of two panels with 32 rows to the accumulators ``panel + 2 * half``."""
    for plane in range(planes):
        for panel in range(2):
            _load_tile(builder, _W[panel], tiles, (panel * 2 + plane) * TILE_BYTES)
        for row_part in (0, 1) if plane == 0 else (1, 0):
            # The second plane begins with the part that the first one ended with.
            for half in range(2) if plane == 0 or row_part == 0 else ():
                offset = builder.add(builder.mul(part, _I64(row_part)), builder.mul(tile_row, _I64(half)))
                _load_tile(builder, _A[half], builder.add(operand, offset), 0)
            for half in range(2):
                for panel in range(2):
                    _dot(builder, panel + 2 * half, _A[half], _W[panel])


def step_kernel(tall: bool, planes: int, widen: bool, multiply: bool) -> Any:
    """A straight run of code: widen one step's weights and multiply another's, interleaved.

    Arguments: the address of the weights to widen, the bytes from panel to panel, the prefetch
    distance, where the tiles go; the tiles to multiply, the operand's hi tile for that step, the
    bytes from it to its lo tile and, if ``tall``, to the hi tile of the next rows.
    """

    @intrinsic
    def step(
        typing_context: Any, weight: Any, panel_stride: Any, ahead: Any, target: Any, tiles: Any,
        operand: Any, part: Any, tile_row: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, panel_stride, ahead, target, tiles, operand, part, tile_row = arguments
            for first in (0,) if tall else (0, 2):
                pair = range(first, first + 2)
                if widen:
                    for panel in pair:
                        source = builder.add(weight, builder.mul(panel_stride, _I64(panel)))
                        _emit_widen(builder, planes, source, ahead, target, panel * 2 * TILE_BYTES)
                if multiply and tall:
                    _emit_tall_products(builder, planes, tiles, operand, part, tile_row)
                elif multiply:
                    _emit_products(builder, planes, pair, tiles, operand, part)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return step


def accumulators(operation: str, panels: range, first: int) -> Any:
    """Load or store the accumulators from ``first`` on at ``(out, out_stride)``."""

    @intrinsic
    def transfer(typing_context: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for panel in panels:
                place = _pointer(builder, arguments[0], panel * LANES * 4)
                _call(builder, f"llvm.x86.{operation}", [_I8(first + panel), place, arguments[1]])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return transfer


@intrinsic
def zero_accumulators(typing_context: Any) -> Any:
    """Zero the accumulators."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for tile in range(4):
            _call(builder, "llvm.x86.tilezero", [_I8(tile)])
        return context.get_dummy_value()

    return types.void(), codegen


def _stack(builder: Any, size: int) -> Any:
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(_I8, size))
        memory.align = 64
    return memory


@intrinsic
def tile_scratch(typing_context: Any) -> Any:
    """The address of this thread's tiles, on its stack, with room for a row of two panels behind."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(_stack(builder, SCRATCH_BYTES + 2 * LANES * 4), _I64)

    return types.int64(), codegen


@intrinsic
def configure_tiles(typing_context: Any, rows: Any, more_rows: Any) -> Any:
    """Shape the tiles, all 64 bytes wide: weights 16 high; accumulators and operand ``rows``, those
    of the second half of 32 rows ``more_rows``. With ``more_rows`` 0 all are ``rows`` high."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.ptrtoint(_stack(builder, 64), _I64)

        def put(value: Any, offset: int) -> None:
            builder.store(value, _pointer(builder, address, offset)).align = 1

        rows = builder.trunc(arguments[0], _I8)
        tall = builder.icmp_signed(">", arguments[1], _I64(0))
        more = builder.select(tall, builder.trunc(arguments[1], _I8), rows)
        for offset in range(0, 64, 8):
            put(_I64(0), offset)
        put(_I8(1), 0)
        for tile, height in enumerate((rows, rows, more, more, rows, more, _I8(TILE_ROWS), _I8(TILE_ROWS))):
            put(_I16(64), 16 + 2 * tile)
            put(height, 48 + tile)
        _call(builder, "llvm.x86.ldtilecfg", [_pointer(builder, address)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give the tiles up: a thread that holds some is slower to switch away from."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def split_halves(typing_context: Any, source: Any, high: Any, low: Any) -> Any:
    """32 halves at ``source`` into bf16 at ``high`` and ``low``. Nonzero if one is not finite."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.VectorType(_I32, STEP)
        short = ir.VectorType(_I16, STEP)
        floats = ir.VectorType(ir.FloatType(), STEP)
        bits = builder.load(_pointer(builder, arguments[0]), typ=short)
        bits.align = 2
        value = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), STEP)), floats)
        top = builder.and_(builder.bitcast(value, wide), ir.Constant(wide, [0xFFFF0000] * STEP))
        rest = builder.fsub(value, builder.bitcast(top, floats))
        for part, place in ((top, arguments[1]), (builder.bitcast(rest, wide), arguments[2])):
            upper = builder.trunc(builder.lshr(part, ir.Constant(wide, [16] * STEP)), short)
            builder.store(upper, _pointer(builder, place)).align = 2
        exponent = ir.Constant(short, [0x7C00] * STEP)
        special = builder.icmp_unsigned("==", builder.and_(bits, exponent), exponent)
        return builder.zext(builder.bitcast(special, _I32), _I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def float_bits(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), codegen
