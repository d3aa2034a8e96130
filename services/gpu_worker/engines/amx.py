"""Products on AMX tiles: bf16 dot products that are exact for f16 factors.

A finite f16 value has 11 significant bits and is the exact sum of two bf16 values of 8: ``hi``,
its f32 bits cut to the upper half, and ``lo``, the rest (at most 3 significant bits). So
``a·w = ahi·whi + alo·whi + ahi·wlo + alo·wlo``, four tile products in f32, nothing dropped: only
the f32 additions round, as in any other kernel. AMX flushes bf16 and f32 denormals. None
occurs: every nonzero part is a multiple of 2^-24 and every nonzero product one of 2^-48.
An infinity has no such parts; the engine leaves those operands and weights to the vector kernel.

Memory holds the weights as the vector kernel has them, panels ``[k][16 columns]`` of f16, and
each thread widens what it multiplies into tiles ``[k / 2][16 columns][2]`` of bf16, one for hi
and one for lo, in its first-level cache. A decode step then costs little more than reading its
weights. Weights whose lo parts are all zero (bf16 checkpoints) need two products instead of four.

Nothing in here is compiled before :func:`kernels` is called, so that the module imports anywhere.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from gelo.atomics import atomic_load
from gelo.f16 import half_to_float
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from gpu_worker.engines.microkernel import (
    DEPTH,
    LANES,
    OPERAND,
    OPERAND_STRIDE,
    OUT,
    OUT_STRIDE,
    ROWS,
    WEIGHT,
)

_log = logging.getLogger(__name__)

STEP = 32  # input indices of one tile product: weights are padded to a multiple of it
TILE_ROWS = 16
GROUP = 4  # panels multiplied together, an accumulator tile each
_TILE_BYTES = 1024
_BLOCK_STEPS = 8  # steps widened at once when more than 16 rows use them
_SCRATCH_BYTES = _BLOCK_STEPS * GROUP * 2 * _TILE_BYTES
# Bytes ahead, in each panel, that are prefetched.
_PREFETCH_BYTES = 4096

# Tiles 0 to 3 accumulate, the others hold operand and weight parts.
_A_HI, _A_LO = 4, 5
_W = (6, 7)

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
            place = _pointer(builder, target, offset + plane * _TILE_BYTES + pair * 64)
            builder.store(joined, place).align = 64


def _emit_products(
    builder: Any, planes: int, panels: range, tiles: Any, operand: Any, operand_tile: Any
) -> None:
    """Add one step's products of ``panels`` to their accumulators."""
    for plane in range(planes):
        for panel in panels:
            source = _W[panel & 1]
            _load_tile(builder, source, tiles, (panel * 2 + plane) * _TILE_BYTES)
        for part in (_A_HI, _A_LO):
            for panel in panels:
                _call(builder, "llvm.x86.tdpbf16ps", [_I8(panel), _I8(part), _I8(_W[panel & 1])])


def _step(panels: int, planes: int, widen: bool, multiply: bool) -> Any:
    """A straight run of code: widen one step's weights and multiply another's, interleaved.

    Arguments: the address of the weights to widen, the bytes from panel to panel, the prefetch
    distance, where the tiles go; the tiles to multiply, the operand's hi tile for
    that step, the bytes from it to its lo tile.
    """

    @intrinsic
    def step(
        typing_context: Any, weight: Any, panel_stride: Any, ahead: Any, target: Any, tiles: Any,
        operand: Any, operand_tile: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, panel_stride, ahead, target, tiles, operand, operand_tile = arguments
            if multiply:
                _load_tile(builder, _A_HI, operand, 0)
                _load_tile(builder, _A_LO, builder.add(operand, operand_tile), 0)
            for first in range(0, panels, 2):
                pair = range(first, min(first + 2, panels))
                if widen:
                    for panel in pair:
                        source = builder.add(weight, builder.mul(panel_stride, _I64(panel)))
                        _emit_widen(builder, planes, source, ahead, target, panel * 2 * _TILE_BYTES)
                if multiply:
                    _emit_products(builder, planes, pair, tiles, operand, operand_tile)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return step


def _accumulators(panels: int, operation: str) -> Any:
    """Zero the accumulators, or load or store them at ``(out, out_stride)``."""

    @intrinsic
    def accumulators(typing_context: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for panel in range(panels):
                place = [_pointer(builder, arguments[0], panel * LANES * 4), arguments[1]]
                _call(builder, f"llvm.x86.{operation}", [_I8(panel), *(place if "64" in operation else [])])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return accumulators


def _stack(builder: Any, size: int) -> Any:
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(_I8, size))
        memory.align = 64
    return memory


@intrinsic
def _scratch(typing_context: Any) -> Any:
    """The address of this thread's tiles, on its stack."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(_stack(builder, _SCRATCH_BYTES), _I64)

    return types.int64(), codegen


@intrinsic
def _configure(typing_context: Any, rows: Any) -> Any:
    """Shape the tiles: accumulators and operand ``rows`` high, weights 16, all 64 bytes wide."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.ptrtoint(_stack(builder, 64), _I64)

        def put(value: Any, offset: int) -> None:
            builder.store(value, _pointer(builder, address, offset)).align = 1

        for offset in range(0, 64, 8):
            put(_I64(0), offset)
        put(_I8(1), 0)
        rows = builder.trunc(arguments[0], _I8)
        for tile in range(8):
            put(_I16(64), 16 + 2 * tile)
            put(_I8(TILE_ROWS) if tile in _W else rows, 48 + tile)
        _call(builder, "llvm.x86.ldtilecfg", [_pointer(builder, address)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _release(typing_context: Any) -> Any:
    """Give the tiles up: a thread that holds some is slower to switch away from."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _float_bits(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def _bits_float(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


_WIDEN, _MULTIPLY, _BOTH = range(3)
_widen_4x2, _widen_4x1 = _step(4, 2, True, False), _step(4, 1, True, False)
_widen_1x2, _widen_1x1 = _step(1, 2, True, False), _step(1, 1, True, False)
_multiply_4x2, _multiply_4x1 = _step(4, 2, False, True), _step(4, 1, False, True)
_multiply_1x2, _multiply_1x1 = _step(1, 2, False, True), _step(1, 1, False, True)
_both_4x2, _both_4x1 = _step(4, 2, True, True), _step(4, 1, True, True)
_both_1x2, _both_1x1 = _step(1, 2, True, True), _step(1, 1, True, True)
_zero = _accumulators(GROUP, "tilezero")
_load_4, _load_1 = _accumulators(4, "tileloadd64"), _accumulators(1, "tileloadd64")
_store_4, _store_1 = _accumulators(4, "tilestored64"), _accumulators(1, "tilestored64")


@numba.njit(nogil=True, cache=True)
def _advance(
    what: int, panels: int, planes: int, weight: int, panel_stride: int, ahead: int, target: int,
    tiles: int, operand: int, operand_tile: int,
) -> None:  # fmt: skip
    """One step of the wanted kind; see :func:`_step`."""
    if panels == GROUP and planes == 2:
        if what == _BOTH:
            _both_4x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        elif what == _WIDEN:
            _widen_4x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        else:
            _multiply_4x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
    elif panels == GROUP:
        if what == _BOTH:
            _both_4x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        elif what == _WIDEN:
            _widen_4x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        else:
            _multiply_4x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
    elif planes == 2:
        if what == _BOTH:
            _both_1x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        elif what == _WIDEN:
            _widen_1x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
        else:
            _multiply_1x2(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
    elif what == _BOTH:
        _both_1x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
    elif what == _WIDEN:
        _widen_1x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)
    else:
        _multiply_1x1(weight, panel_stride, ahead, target, tiles, operand, operand_tile)


@numba.njit(nogil=True, cache=True)
def _store(panels: int, out: int, out_stride: int) -> None:
    if panels == GROUP:
        _store_4(out, out_stride)
    else:
        _store_1(out, out_stride)


@numba.njit(nogil=True, cache=True)
def _load(panels: int, out: int, out_stride: int) -> None:
    if panels == GROUP:
        _load_4(out, out_stride)
    else:
        _load_1(out, out_stride)


@numba.njit(nogil=True, cache=True)
def _few_rows(
    panels: int, planes: int, operand: int, operand_tile: int, steps: int, weight: int,
    panel_stride: int, scratch: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """At most 16 rows: each weight is widened one step before it is used, and used once."""
    slot = GROUP * 2 * _TILE_BYTES
    _zero(0, 0)
    _advance(_WIDEN, panels, planes, weight, panel_stride, _PREFETCH_BYTES, scratch, 0, 0, 0)
    for step in range(steps - 1):
        ahead = (step + 1) * _TILE_BYTES + _PREFETCH_BYTES
        # At the end of these panels, prefetch the next ones, which lie behind all of them.
        skip = (panels - 1) * panel_stride if ahead >= panel_stride else 0
        _advance(
            _BOTH, panels, planes, weight + (step + 1) * _TILE_BYTES, panel_stride,
            _PREFETCH_BYTES + skip, scratch + ((step + 1) & 1) * slot, scratch + (step & 1) * slot,
            operand + step * 2 * operand_tile, operand_tile,
        )  # fmt: skip
    last = steps - 1
    _advance(
        _MULTIPLY, panels, planes, 0, 0, 0, 0, scratch + (last & 1) * slot,
        operand + last * 2 * operand_tile, operand_tile,
    )  # fmt: skip
    _store(panels, out, out_stride)


@numba.njit(nogil=True, cache=True)
def _many_rows(
    panels: int, planes: int, operand: int, operand_tile: int, steps: int, weight: int,
    panel_stride: int, scratch: int, out: int, out_stride: int, rows: int,
) -> None:  # fmt: skip
    """More than 16 rows: a few steps of weights are widened, then all rows use them."""
    slot = GROUP * 2 * _TILE_BYTES
    height = operand_tile // 64
    for first in range(0, steps, _BLOCK_STEPS):
        count = min(_BLOCK_STEPS, steps - first)
        for step in range(count):
            _advance(
                _WIDEN, panels, planes, weight + (first + step) * _TILE_BYTES, panel_stride,
                _PREFETCH_BYTES, scratch + step * slot, 0, 0, 0,
            )  # fmt: skip
        for row in range(0, rows, height):
            short = rows - row < height
            if short:
                _configure(rows - row)
            place = out + row * out_stride
            if first:
                _load(panels, place, out_stride)
            else:
                _zero(0, 0)
            tiles = operand + (row // height * steps + first) * 2 * operand_tile
            for step in range(count):
                _advance(
                    _MULTIPLY, panels, planes, 0, 0, 0, 0, scratch + step * slot,
                    tiles + step * 2 * operand_tile, operand_tile,
                )  # fmt: skip
            _store(panels, place, out_stride)
            if short:
                _configure(height)


@numba.njit(nogil=True, cache=True)
def _chunk(base: int, first: int, count: int, planes: int) -> None:
    """``count`` panels from ``first`` on of the job at ``base``; ``OPERAND_STRIDE`` is a tile's bytes."""
    operand = atomic_load(base + 8 * OPERAND)  # type: ignore[call-arg]
    operand_tile = atomic_load(base + 8 * OPERAND_STRIDE)  # type: ignore[call-arg]
    weight = atomic_load(base + 8 * WEIGHT)  # type: ignore[call-arg]
    depth = atomic_load(base + 8 * DEPTH)  # type: ignore[call-arg]
    out = atomic_load(base + 8 * OUT)  # type: ignore[call-arg]
    out_stride = atomic_load(base + 8 * OUT_STRIDE)  # type: ignore[call-arg]
    rows = atomic_load(base + 8 * ROWS)  # type: ignore[call-arg]
    panel_stride = depth * 2 * LANES
    steps = depth // STEP
    height = operand_tile // 64
    scratch = _scratch()  # type: ignore[call-arg]
    _configure(height)
    panel = 0
    while panel < count:
        panels = GROUP if panel + GROUP <= count else 1
        w = weight + (first + panel) * panel_stride
        o = out + (first + panel) * LANES * 4
        if rows == height:
            _few_rows(panels, planes, operand, operand_tile, steps, w, panel_stride, scratch, o, out_stride)
        else:
            _many_rows(
                panels, planes, operand, operand_tile, steps, w, panel_stride, scratch, o, out_stride, rows
            )
        panel += panels
    _release()  # type: ignore[call-arg]


def _exact(base: int, first: int, count: int) -> None:
    _chunk(base, first, count, 2)


def _hi_only(base: int, first: int, count: int) -> None:
    _chunk(base, first, count, 1)


@numba.njit(nogil=True, cache=True)
def split_operand(operand: Any, tiles: Any, depth: int) -> bool:
    """f16 bits ``(m, depth)`` to bf16 bits ``(blocks, steps, 2, height, 32)``, hi then lo.

    Rows beyond m are left as they are. Returns False when a value is not finite.
    """
    rows = operand.shape[0]
    height = tiles.shape[3]
    worst = 0
    for row in range(rows):
        block, r = row // height, row % height
        for step in range(tiles.shape[1]):
            start = step * STEP
            high, low = tiles[block, step, 0, r], tiles[block, step, 1, r]
            count = min(STEP, depth - start)
            for k in range(count):
                bits = operand[row, start + k]
                worst = max(worst, bits & 0x7C00)
                value = half_to_float(bits)  # type: ignore[call-arg]
                cut = _float_bits(value) & np.uint32(0xFFFF0000)  # type: ignore[call-arg]
                rest = value - _bits_float(cut)  # type: ignore[call-arg]
                high[k] = cut >> np.uint32(16)
                low[k] = _float_bits(rest) >> np.uint32(16)  # type: ignore[call-arg]
            for k in range(count, STEP):
                high[k] = 0
                low[k] = 0
    return worst != 0x7C00


@numba.njit(nogil=True, cache=True)
def planes_needed(weight: Any) -> int:
    """For f16 bits, any shape flattened: 1 if every lo part is zero, else 2; 0 if not all are finite."""
    low = np.uint32(0)
    worst = 0
    for bits in weight:
        worst = max(worst, bits & 0x7C00)
        low |= _float_bits(half_to_float(bits)) & np.uint32(0xFFFF)  # type: ignore[call-arg]
    if worst == 0x7C00:
        return 0
    return 2 if low else 1


def tile_height(rows: int) -> int:
    """Rows of each operand tile: as even as possible, at most 16."""
    blocks = -(-rows // TILE_ROWS)
    return -(-rows // blocks)


def tiles_shape(rows: int, depth: int) -> tuple[int, int, int, int, int]:
    """The shape of the split operand, see :func:`split_operand`."""
    height = tile_height(rows)
    return -(-rows // height), -(-depth // STEP), 2, height, STEP


def aligned_zeros(size: int) -> NDArray[np.uint16]:
    """``size`` words on cache lines: a tile row that straddles two lines is read twice."""
    memory = np.zeros(size + 32, dtype=np.uint16)
    start = -int(memory.ctypes.data) % 64 // 2
    return memory[start : start + size]


def target_features() -> frozenset[str]:
    """What the compiler may use: the processor's features as numba's target has them."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@lru_cache(maxsize=1)
def unavailable() -> str:
    """Why this process cannot use AMX; empty if it can, after asking the kernel's permission."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "not Linux on x86-64"
    if missing := {"amx-tile", "amx-bf16", "avx512f"} - target_features():
        return f"the processor or numba's target lacks {', '.join(sorted(missing))}"
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): for all threads of the process.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18)):
        return f"the kernel refused it, errno {ctypes.get_errno()}"
    return ""


@lru_cache(maxsize=1)
def kernels() -> dict[int, Any]:
    """By the number of weight planes, the compiled function for a chunk; only where available."""
    signature = types.void(types.int64, types.int64, types.int64)
    return {
        planes: numba.cfunc(signature, nopython=True, cache=True)(function)
        for planes, function in ((2, _exact), (1, _hi_only))
    }


def kernel_addresses() -> dict[int, int]:
    """:func:`kernels` as addresses, good for the life of the process."""
    return {planes: int(kernel.address) for planes, kernel in kernels().items()}
