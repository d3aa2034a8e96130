"""The CPU engine's own loop over the offloads of a slab: no interpreter between them.

A decode step is a hundred products of 50 µs to 200 µs. Decoding a header, taking views and calling
compiled code from Python would add some 30 µs to each. Here one compiled function waits for
requests, checks them, multiplies and answers, until something comes up that it leaves to Python:
nothing to do for a while, somebody else who wants the engine, a peer that sleeps, or a request
that is not plain (malformed, more rows than the scratch holds, a result to be padded).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gelo.atomics import atomic_load, monotonic_ns
from gelo.doorbell_kernels import WORDS, ring_header, wait_header, well_formed
from gelo.header import OperandKind
from gelo.processors import current_processor, move_off
from gelo.slab import Doorbell, Slab
from gpu_worker.engines.amx import split_operand, tiles_shape
from gpu_worker.engines.base import Left
from gpu_worker.engines.memory import aligned_bytes
from gpu_worker.engines.microkernel import LANES, padded_rows, widen_operand
from gpu_worker.engines.ring_kernels import JOB_WORDS, STEP
from gpu_worker.engines.ring_product import multiply
from gpu_worker.engines.team import Team, lead

# Rows that the loop's scratch holds: decode steps, also of several sequences.
MAX_ROWS = 64

# Columns of the table of weights. The first three are of every weight's; then, by kind:
# f16 panels, their depth, the fewest rows that the kernel at KERNEL multiplies;
# int8 panels, their steps and parts.
D_IN, D_OUT, KIND, PACKED, PANELS, DEPTH, FEWEST_ROWS, KERNEL, COLUMNS = range(9)
STEPS, PARTS = DEPTH, FEWEST_ROWS
OF_KIND = PACKED
_HALF = int(OperandKind.HALF)
_LOW = 0xFFFFFFFF


@numba.njit(nogil=True, cache=True)
def _multiply_words(
    kernels: Any, weight: Any, rows: int, operand: Any, out: int, tiles: Any, product: Any, job: Any,
    base: int,
) -> None:  # fmt: skip
    """As ``RingCpu.matmul``."""
    d_in = weight[D_IN]
    multiply(
        kernels, weight[PACKED], weight[PANELS], weight[STEPS], weight[PARTS],
        operand[: rows * d_in].reshape(rows, d_in), out, weight[D_OUT], tiles.ctypes.data, product, job, base,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _multiply(
    weight: Any, rows: int, operand: Any, out: int, tiles: Any, wide: Any, job: Any, base: int
) -> bool:
    """As ``CpuEngine.matmul``; False, and nothing done, if the result would have to be padded."""
    d_in, depth, panels = weight[D_IN], weight[DEPTH], weight[PANELS]
    bits = operand[: rows * d_in].reshape(rows, d_in)
    stride = panels * LANES * 4
    if rows >= weight[FEWEST_ROWS]:
        shape = tiles_shape(rows, depth)
        size = shape[0] * shape[1] * shape[2] * shape[3] * shape[4]
        if split_operand(bits, tiles[:size].reshape(shape)):
            lead(
                job, base, tiles.ctypes.data, shape[3] * shape[4] * 2, weight[PACKED], depth, out, stride,
                rows, panels, weight[KERNEL],
            )  # fmt: skip
            return True
    if padded_rows(rows) != rows:
        return False
    widen_operand(bits, wide[: rows * depth].reshape(rows, depth), rows, d_in)
    lead(job, base, wide.ctypes.data, depth * 4, weight[PACKED], depth, out, stride, rows, panels, 0)
    return True


@numba.njit(nogil=True, cache=True)
def serve(
    bell: Any, words: Any, table: Any, kernels: Any, halves: Any, operand: Any, result: Any, tiles: Any,
    wide: Any, product: Any, job: Any, base: int, wanted: int, spins: int,
) -> int:  # fmt: skip
    """Answer requests; returns a :class:`Left`.

    ``bell`` and ``words`` as in :class:`gelo.slab.Doorbell`. ``halves`` (uint16) and ``operand``
    (uint32), both of the operand area, and ``result`` (uint32) are the slab's areas: memory that
    the runner can change at any time.
    """
    runner = np.empty(1, np.int64)
    while True:
        if atomic_load(wanted) != 0:
            return Left.WANTED
        if not wait_header(bell[1], bell[5], spins, bell[0], words):
            return Left.IDLE
        bell[5] = words[8]
        weight_id, rows = words[2] & _LOW, words[2] >> 32 & _LOW
        d_in, d_out = words[3] & _LOW, words[3] >> 32 & _LOW
        if not well_formed(words) or weight_id >= table.shape[0] or rows > MAX_ROWS:
            return Left.REQUEST
        weight = table[weight_id]
        fits = weight[D_IN] == d_in and weight[D_OUT] == d_out and weight[KIND] == words[7]
        if not fits or rows * d_out > result.size:
            return Left.REQUEST
        runner[0] = words[WORDS + 1]
        if runner[0] == current_processor():
            move_off(runner)
        started = monotonic_ns()
        if weight[KIND] == _HALF:
            if rows * d_in > halves.size or d_out != weight[PANELS] * LANES:
                return Left.REQUEST
            if not _multiply(weight, rows, halves, result.ctypes.data, tiles, wide, job, base):
                return Left.REQUEST
        else:
            if rows * d_in > operand.size:
                return Left.REQUEST
            _multiply_words(
                kernels, weight, rows, operand, result.ctypes.data, tiles, product, job, base
            )  # fmt: skip
        took = monotonic_ns() - started
        bell[6] += 1
        if ring_header(
            bell[2], bell[3], bell[6], bell[4], words[1], weight_id, rows, d_in, d_out, took, words[7]
        ):  # fmt: skip
            return Left.ASLEEP


class CpuLoop:
    """The loop of one session. One thread runs it, and only while it has the engine to itself."""

    def __init__(
        self, team: Team, table: NDArray[np.int64], kernels: NDArray[np.int64], slab: Slab, doorbell: Doorbell
    ) -> None:
        """``table`` has a row of :data:`COLUMNS` per weight; ``kernels`` as for ``ring_product.multiply``."""
        self._team = team
        self._table = table
        self._kernels = kernels
        self._halves, self._operand, self._result = slab.areas()
        self._doorbell = doorbell
        halves = table[:, KIND] == _HALF
        depth = int(table[halves, DEPTH].max(initial=1))
        steps = int(table[~halves, STEPS].max(initial=1))
        self._tiles = aligned_bytes((MAX_ROWS + 4) * 4 * max(depth, STEP * steps)).view(np.uint16)
        self._wide = np.empty(MAX_ROWS * depth, dtype=np.float32)
        self._product = np.zeros(JOB_WORDS, dtype=np.int64)

    def serve(self, wanted: int, spins: int) -> Left:
        """Answer until there is a reason not to; ``wanted`` is the address of a word that asks for it."""
        bell = self._doorbell
        return Left(
            serve(
                bell.state, bell.words, self._table, self._kernels, self._halves, self._operand, self._result,
                self._tiles, self._wide, self._product, self._team.job, self._team.base, wanted, spins,
            )
        )  # fmt: skip
