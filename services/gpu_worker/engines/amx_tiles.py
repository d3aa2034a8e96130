"""AMX tiles and the vector code around them, as numba primitives; see :mod:`gpu_worker.engines.amx`.

Addresses and strides are plain integers, in bytes. A weight is widened from panels ``[k][16
columns]`` of f16 to tiles ``[k / 2][16 columns][2]`` of bf16, for each panel hi and then lo.
Compiling anything in here but :func:`split_halves` and :func:`float_bits` needs AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


# A few instructions to emit, and whether they are a tile product.
_Piece = tuple[bool, Callable[[], None]]


def _emit_widened(
    builder: Any, planes: int, weight: Any, ahead: Any, target: Any, panel: int, pair: int
) -> None:
    """Two of the 32 input indices of the panel at ``weight`` into rows ``pair`` of its bf16 tiles."""
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
        place = _pointer(builder, target, (panel * 2 + plane) * TILE_BYTES + pair * 64)
        builder.store(joined, place).align = 64


def _widening(
    builder: Any, planes: int, panels: range, weight: Any, panel_stride: Any, ahead: Any, target: Any
) -> list[_Piece]:
    """One step's weights of ``panels`` into tiles at ``target``."""
    pieces: list[_Piece] = []
    for panel in panels:
        source = builder.add(weight, builder.mul(panel_stride, _I64(panel)))
        for pair in range(STEP // 2):
            piece = partial(_emit_widened, builder, planes, source, ahead, target, panel, pair)
            pieces.append((False, piece))
    return pieces


def _products(builder: Any, planes: int, panels: range, tiles: Any, operand: Any, part: Any) -> list[_Piece]:
    """Add one step's products of ``panels`` with 16 rows to their accumulators."""
    pieces: list[_Piece] = []
    if panels.start == 0:
        for row_part in range(2):
            place = builder.add(operand, builder.mul(part, _I64(row_part)))
            pieces.append((False, partial(_load_tile, builder, _A[row_part], place, 0)))
    for plane in range(planes):
        for panel in panels:
            offset = (panel * 2 + plane) * TILE_BYTES
            pieces.append((False, partial(_load_tile, builder, _W[panel & 1], tiles, offset)))
        for source in _A:
            pieces += [(True, partial(_dot, builder, panel, source, _W[panel & 1])) for panel in panels]
    return pieces


def _tall_products(
    builder: Any, planes: int, tiles: Any, operand: Any, part: Any, tile_row: Any
) -> list[_Piece]:
    """Add one step's products of two panels with 32 rows to the accumulators ``panel + 2 * half``."""
    pieces: list[_Piece] = []
    for plane in range(planes):
        for panel in range(2):
            offset = (panel * 2 + plane) * TILE_BYTES
            pieces.append((False, partial(_load_tile, builder, _W[panel], tiles, offset)))
        for row_part in (0, 1) if plane == 0 else (1, 0):
            # The second plane begins with the part that the first one ended with.
            for half in range(2) if plane == 0 or row_part == 0 else ():
                behind = builder.add(builder.mul(part, _I64(row_part)), builder.mul(tile_row, _I64(half)))
                place = builder.add(operand, behind)
                pieces.append((False, partial(_load_tile, builder, _A[half], place, 0)))
            for half in range(2):
                for panel in range(2):
                    dot = partial(_dot, builder, panel + 2 * half, _A[half], _W[panel])
                    pieces.append((True, dot))
    return pieces


def _emit_together(widening: list[_Piece], products: list[_Piece]) -> None:
    """Emit both, the widening spread over the gaps between products.

    The processor looks a few hundred instructions ahead: products in a row leave its vector units idle,
    and widening in a row its tile unit.
    """
    dots = sum(dot for dot, _ in products)
    emitted = seen = 0
    for dot, emit in products:
        emit()
        seen += dot
        while dot and emitted < len(widening) * seen // dots:
            widening[emitted][1]()
            emitted += 1
    for _, emit in widening[emitted:]:
        emit()


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
                panels = range(first, first + 2)
                widening: list[_Piece] = []
                products: list[_Piece] = []
                if widen:
                    widening = _widening(builder, planes, panels, weight, panel_stride, ahead, target)
                if multiply and tall:
                    products = _tall_products(builder, planes, tiles, operand, part, tile_row)
                elif multiply:
                    products = _products(builder, planes, panels, tiles, operand, part)
                _emit_together(widening, products)
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
def copy_past(typing_context: Any, source: Any, target: Any) -> Any:
    """Copy a row of :data:`PANELS` panels, 64-byte aligned, past the caches; :func:`settle` it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        past = builder.module.add_metadata([_I32(1)])
        for offset in range(0, PANELS * LANES * 4, 64):
            value = builder.load(_pointer(builder, arguments[0], offset), typ=_FLOATS)
            value.align = 64
            written = builder.store(value, _pointer(builder, arguments[1], offset))
            written.align = 64
            written.set_metadata("nontemporal", past)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def settle(typing_context: Any) -> Any:
    """What was written past the caches is seen by others before what is written next: ``sfence``.

    A sequentially consistent fence may be compiled to a locked instruction, which the language does not
    promise to order such stores.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.sse.sfence", [])
        return context.get_dummy_value()

    return types.void(), codegen


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
    """The address of this thread's tiles, on its stack, with room for the result of a pass behind."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(_stack(builder, SCRATCH_BYTES + PANELS * TILE_BYTES), _I64)

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
