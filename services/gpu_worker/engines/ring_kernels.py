"""Vector kernels for products modulo 2^32: uint32 rows times int8 column panels.

Weights are packed in *panels* of 16 output columns, four input indices to a word:
``panels[p, k / 4, j, k % 4]`` is weight ``(16 p + j, k)`` int8, in whole steps of 64 input
indices and groups of 4 panels, padded with zeros. All kernels of the CPU, AMX's too, read this.

Two of them are here. *Dot products*: an operand word is split into its four bytes, y = Σ 2^(8i)·yᵢ,
each an unsigned *plane*; VPDPBUSD adds four products of an unsigned and a signed byte to a 32-bit
sum without saturation, so a plane's sums are exact modulo 2^32 and so is Σ 2^(8i)·sumᵢ.
*Words*: weights are widened and multiplied with wrapping 32-bit arithmetic, on any processor.

Addresses and strides are plain integers, in bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gelo.atomics import atomic_load
from gpu_worker.engines.microkernel import LANES, OPERAND

STEP = 64  # input indices: weights and operands are padded to a multiple of it
PANELS = 4  # weights are padded to a multiple of it
PLANES = 4  # bytes of an operand word
STEP_BYTES = STEP * LANES  # of one panel
WEIGHT_PREFETCH_BYTES = 4096

# A job: an int64 array whose address is the team's ``OPERAND`` word. Strides of the operand are
# those of :func:`split_rows`; ``COLUMNS`` are the valid ones of the result, whose last panel may be cut.
(
    SOURCE, ROW_BYTES, STEP_STRIDE, BLOCK_STRIDE, BLOCK_ROWS,
    WEIGHT, PANEL_STRIDE, STEPS, OUT, OUT_STRIDE, ROWS, COLUMNS,
) = range(12)  # fmt: skip
JOB_WORDS = 12

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_PTR = ir.PointerType()
_WORDS = ir.VectorType(_I32, LANES)


def _pointer(builder: Any, address: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), _PTR)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def prefetch(builder: Any, address: Any, offset: int = 0) -> None:
    """Emit a prefetch of the cache line at ``address + offset``."""
    arguments = [_pointer(builder, address, offset), _I32(0), _I32(3), _I32(1)]
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_WORDS, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, _I32(0)), undefined, ir.Constant(_WORDS, [0] * LANES)
    )


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _load(builder: Any, address: Any, offset: int = 0) -> Any:
    loaded = builder.load(_pointer(builder, address, offset), typ=_WORDS)
    loaded.align = 4
    return loaded


def _combine(builder: Any, sums: list[Any]) -> Any:
    """The planes' sums to the words' sums."""
    total = sums[0]
    for plane in range(1, PLANES):
        total = builder.add(total, builder.shl(sums[plane], _all(8 * plane)))
    return total


def _valid(builder: Any, columns: Any) -> Any:
    """The mask of the first ``columns`` lanes; any int64."""
    small = builder.icmp_signed("<", columns, _I64(LANES))
    count = builder.trunc(builder.select(small, columns, _I64(LANES)), _I32)
    return builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))), _splat(builder, count))


def _store(builder: Any, value: Any, out: Any, mask: Any) -> None:
    arguments = [value, builder.inttoptr(out, _PTR), _I32(4), mask]
    _call(builder, f"llvm.masked.store.v{LANES}i32.p0", ir.VoidType(), arguments)


@intrinsic
def combine_planes(
    typing_context: Any, source: Any, plane_stride: Any, out: Any, columns: Any, accumulate: Any
) -> Any:
    """The first ``columns`` of 16 sums of a row, from those of its planes: to ``out`` or added there."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, plane_stride, out, columns, accumulate = arguments
        planes = [
            _load(builder, builder.add(source, builder.mul(plane_stride, _I64(plane))))
            for plane in range(PLANES)
        ]
        mask = _valid(builder, columns)
        again = _valid(builder, builder.select(accumulate, columns, _I64(0)))
        before = _call(
            builder, f"llvm.masked.load.v{LANES}i32.p0", _WORDS,
            [builder.inttoptr(out, _PTR), _I32(4), again, _all(0)],
        )  # fmt: skip
        _store(builder, builder.add(before, _combine(builder, planes)), out, mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.boolean), codegen


@intrinsic
def split_step(typing_context: Any, source: Any, target: Any, plane_stride: Any, shift: Any) -> Any:
    """64 words at ``source``, shifted left by ``shift``, to 64 bytes in each of four planes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, plane_stride, shift = arguments
        wide, narrow = ir.VectorType(_I32, STEP), ir.VectorType(_I8, STEP)
        words = builder.load(builder.inttoptr(source, _PTR), typ=wide)
        words.align = 4
        quarter = _splat(builder, builder.trunc(shift, _I32))
        amount = builder.shuffle_vector(quarter, quarter, ir.Constant(ir.VectorType(_I32, STEP), [0] * STEP))
        shifted = builder.shl(words, amount)
        for plane in range(PLANES):
            part = builder.lshr(shifted, ir.Constant(wide, [8 * plane] * STEP))
            place = builder.add(target, builder.mul(plane_stride, _I64(plane)))
            builder.store(builder.trunc(part, narrow), builder.inttoptr(place, _PTR)).align = 1
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _tile(rows: int, panels: int, dot: bool) -> Any:
    """Products of ``rows`` operand rows with ``panels`` neighbouring panels, summed in registers.

    The operand is planes of bytes, ``row_bytes`` apart, if ``dot``, else words.
    """

    @intrinsic
    def tile(
        typing_context: Any, source: Any, row_bytes: Any, weight: Any, panel_stride: Any, quads: Any,
        out: Any, out_stride: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile(builder, rows, panels, dot, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


def _emit_tile(builder: Any, rows: int, panels: int, dot: bool, arguments: Any) -> None:
    source, row_bytes, weight, panel_stride, quads, out, out_stride, columns = arguments
    entry = builder.block
    loop = builder.function.append_basic_block("tile")
    done = builder.function.append_basic_block("tile_done")
    parts = PLANES if dot else 1
    builder.branch(loop)

    builder.position_at_end(loop)
    quad = builder.phi(_I64)
    quad.add_incoming(_I64(0), entry)
    sums = [[builder.phi(_WORDS) for _ in range(panels)] for _ in range(rows * parts)]
    for total in (total for row in sums for total in row):
        total.add_incoming(_all(0), entry)
    weights = []
    # At the end of these panels, prefetch the next ones, which lie behind all of them.
    near_end = builder.icmp_signed("<=", builder.sub(quads, quad), _I64(WEIGHT_PREFETCH_BYTES // (4 * LANES)))
    behind = builder.select(near_end, builder.mul(panel_stride, _I64(panels - 1)), _I64(0))
    for panel in range(panels):
        address = builder.add(
            weight, builder.add(builder.mul(panel_stride, _I64(panel)), builder.mul(quad, _I64(4 * LANES)))
        )
        prefetch(builder, builder.add(address, behind), WEIGHT_PREFETCH_BYTES)
        weights.append(_load(builder, address))
    at = builder.add(source, builder.mul(quad, _I64(4 if dot else 16)))
    updated = (_emit_dots if dot else _emit_words)(builder, at, row_bytes, weights, sums)
    following = builder.add(quad, _I64(1))
    quad.add_incoming(following, loop)
    for totals, news in zip(sums, updated, strict=True):
        for total, new in zip(totals, news, strict=True):
            total.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, quads), loop, done)

    builder.position_at_end(done)
    for row in range(rows):
        place = builder.add(out, builder.mul(out_stride, _I64(row)))
        for panel in range(panels):
            planes = [updated[row * parts + part][panel] for part in range(parts)]
            total = _combine(builder, planes) if dot else planes[0]
            mask = _valid(builder, builder.sub(columns, _I64(LANES * panel)))
            _store(builder, total, builder.add(place, _I64(4 * LANES * panel)), mask)


def _operand(builder: Any, at: Any, row_bytes: Any, row: int, offset: int = 0) -> Any:
    address = builder.add(at, builder.mul(row_bytes, _I64(row)))
    word = builder.load(_pointer(builder, address, offset), typ=_I32)
    word.align = 4
    return _splat(builder, word)


def _emit_dots(builder: Any, at: Any, row_bytes: Any, weights: list[Any], sums: Any) -> Any:
    updated = []
    for row, totals in enumerate(sums):
        bytes_ = _operand(builder, at, row_bytes, row)
        updated.append([
            _call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, [total, bytes_, words])
            for total, words in zip(totals, weights, strict=True)
        ])  # fmt: skip
    return updated


def _emit_words(builder: Any, at: Any, row_bytes: Any, weights: list[Any], sums: Any) -> Any:
    updated = [list(totals) for totals in sums]
    for k in range(4):
        wide = [
            builder.ashr(builder.shl(words, _all(24 - 8 * k)) if k < 3 else words, _all(24))
            for words in weights
        ]
        for row, totals in enumerate(updated):
            value = _operand(builder, at, row_bytes, row, 4 * k)
            totals[:] = [
                builder.add(total, builder.mul(value, words))
                for total, words in zip(totals, wide, strict=True)
            ]
    return updated


_dots_1, _dots_2, _dots_3 = _tile(1, 4, True), _tile(2, 2, True), _tile(3, 2, True)
_words_1, _words_2, _words_4 = _tile(1, 4, False), _tile(2, 2, False), _tile(4, 1, False)


@intrinsic
def word_pointer(typing_context: Any, address: Any) -> Any:
    """``address`` as a pointer to uint32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint32)(types.int64), codegen


@numba.njit(nogil=True, cache=True)
def job_word(base: int, word: int) -> int:
    """A word of the job of the team at ``base``."""
    return atomic_load(atomic_load(base + 8 * OPERAND) + 8 * word)


def _chunk_dots(base: int, first: int, count: int) -> None:
    row_bytes, out_stride = job_word(base, ROW_BYTES), job_word(base, OUT_STRIDE)
    panel_stride, rows = job_word(base, PANEL_STRIDE), job_word(base, ROWS)
    quads = job_word(base, STEPS) * (STEP // 4)
    for panel in range(first, first + count, 2):
        weight = job_word(base, WEIGHT) + panel * panel_stride
        out = job_word(base, OUT) + panel * LANES * 4
        columns = job_word(base, COLUMNS) - panel * LANES
        row = 0
        while row < rows:
            source = job_word(base, SOURCE) + row * PLANES * row_bytes
            place = out + row * out_stride
            if rows == 1:
                if panel % 4 == 0:
                    _dots_1(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 1
            elif rows - row in (2, 4):
                _dots_2(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 2
            else:
                _dots_3(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 3


def _chunk_words(base: int, first: int, count: int) -> None:
    row_bytes, out_stride = job_word(base, ROW_BYTES), job_word(base, OUT_STRIDE)
    panel_stride, rows = job_word(base, PANEL_STRIDE), job_word(base, ROWS)
    quads = job_word(base, STEPS) * (STEP // 4)
    for panel in range(first, first + count):
        weight = job_word(base, WEIGHT) + panel * panel_stride
        out = job_word(base, OUT) + panel * LANES * 4
        columns = job_word(base, COLUMNS) - panel * LANES
        row = 0
        while row < rows:
            source, place = job_word(base, SOURCE) + row * row_bytes, out + row * out_stride
            if rows - row >= 4:
                _words_4(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 4
            elif rows - row >= 2:
                if panel % 2 == 0:
                    _words_2(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 2
            else:
                if panel % 4 == 0:
                    _words_1(source, row_bytes, weight, panel_stride, quads, place, out_stride, columns)
                row += 1


@numba.njit(nogil=True, cache=True)
def split_rows(
    operand: Any, shift: int, target: int, row_bytes: int, step_stride: int, block_stride: int,
    block_rows: int,
) -> None:  # fmt: skip
    """``operand`` ``(m, d_in)`` uint32, C-contiguous, shifted left by ``shift``, to byte planes.

    Plane i of row r, input index k goes to byte ``r // block_rows · block_stride + (k // 64) ·
    step_stride + (4 (r % block_rows) + i) · row_bytes + k % 64`` of ``target``; the last step is
    padded with zeros. The operand may be memory that others write: each word is read once.
    """
    rows, depth = operand.shape
    rest = np.zeros(STEP, dtype=np.uint32)
    for row in range(rows):
        source = operand.ctypes.data + row * depth * 4
        place = target + row // block_rows * block_stride + row % block_rows * PLANES * row_bytes
        for step in range(depth // STEP):
            split_step(source + step * 4 * STEP, place + step * step_stride, row_bytes, shift)
        start = depth - depth % STEP
        if start < depth:
            rest[: depth - start] = operand[row, start:]
            split_step(rest.ctypes.data, place + start // STEP * step_stride, row_bytes, shift)


@numba.njit(nogil=True, cache=True)
def copy_rows(operand: Any, shift: int, target: int, row_bytes: int) -> None:
    """``operand`` as for :func:`split_rows`, shifted, to rows of words; whole steps, the rest zeros."""
    rows, depth = operand.shape
    width = (depth + STEP - 1) // STEP * STEP
    for row in range(rows):
        copy = numba.carray(word_pointer(target + row * row_bytes), width)
        for k in range(depth):
            copy[k] = operand[row, k] << np.uint32(shift)
        copy[depth:] = 0


@lru_cache(maxsize=1)
def dots_kernel() -> Any:
    """The compiled function for a chunk, with dot products; only on processors with AVX-512 VNNI."""
    return compile_chunk(_chunk_dots)


@lru_cache(maxsize=1)
def words_kernel() -> Any:
    """The compiled function for a chunk, for any processor."""
    return compile_chunk(_chunk_words)


def compile_chunk(function: Any) -> Any:
    """``function(job address, first panel, panels)``, compiled for a team."""
    signature = types.void(types.int64, types.int64, types.int64)
    return numba.cfunc(signature, nopython=True, cache=True)(function)
