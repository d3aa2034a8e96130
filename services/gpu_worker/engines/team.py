"""A small team of threads that spin, yielding, between the jobs of one token.

A decode step hands the engine a new product every 100 µs or so. Waking a sleeping thread
costs about half of that, so helpers stay awake for a bounded while after each job and give
their core away whenever another thread wants it; after that they sleep until called.

Threads are not pinned: a pinned thread that yields to another program's on its processor waits for
a whole time slice of it, at every offload. But threads that all spin look equally busy to the kernel,
which then may leave two of a team on one processor while the runner spins alone on another: on 2 cores
a helper missed two products of three. So each member says where it is, and a helper that finds
itself on the processor of a member before it moves to another if it can, once per job.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np

from gelo.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    futex_wait,
    futex_wake,
    yield_cpu,
)
from gelo.processors import current_processor, move_off
from gpu_worker.engines.microkernel import (
    CALL,
    CHUNK,
    CHUNKS,
    DEPTH,
    DONE,
    JOB_WORDS,
    KERNEL,
    OPERAND,
    OPERAND_STRIDE,
    OUT,
    OUT_STRIDE,
    PANELS,
    ROWS,
    SIZE,
    SLEEPING,
    STOP,
    TICKET,
    WEIGHT,
    work,
)

# Yields before a helper sleeps: about a millisecond, longer than the gap between two offloads.
_HELPER_SPINS = 3000
_EPOCHS = 0x3FFFFFFF
# Behind the job's words: the processor of each member, the leader's first, -1 while it sleeps.
_PLACES = JOB_WORDS


@numba.njit(nogil=True, cache=True)
def lead(
    job: Any, base: int, operand: int, operand_stride: int, weight: int, depth: int, out: int,
    out_stride: int, rows: int, panels: int, kernel: int,
) -> None:  # fmt: skip
    """Publish a job, call the helpers, do a share of it, and wait for theirs. See :meth:`Team.run`."""
    epoch = (atomic_load(base + 8 * CALL) + 1) & _EPOCHS
    atomic_store(base + 8 * _PLACES, current_processor())
    size = job[SIZE]
    chunk = max(1, min(64, panels // (4 * size)))
    if panels >= 32 * size:
        chunk = (chunk + 7) // 8 * 8
    if kernel:
        chunk = (chunk + 3) // 4 * 4
    chunks = (panels + chunk - 1) // chunk
    job[OPERAND] = operand
    job[OPERAND_STRIDE] = operand_stride
    job[WEIGHT] = weight
    job[DEPTH] = depth
    job[OUT] = out
    job[OUT_STRIDE] = out_stride
    job[ROWS] = rows
    job[PANELS] = panels
    job[CHUNK] = chunk
    job[KERNEL] = kernel
    atomic_store(base + 8 * DONE, 0)
    atomic_store(base + 8 * CHUNKS, (epoch << 32) | chunks)
    atomic_store(base + 8 * TICKET, epoch << 32)
    atomic_store(base + 8 * CALL, epoch)
    if atomic_load(base + 8 * SLEEPING) > 0:
        futex_wake(base + 8 * CALL, 1 << 30)
    work(job, base)
    while atomic_load(base + 8 * DONE) != chunks:
        yield_cpu()


@numba.njit(nogil=True, cache=True)
def keep_apart(base: int, index: int, taken: Any) -> bool:
    """Leave the processor of a member before ``index``, the caller's, if there is another to go to.

    False if no such member is there. ``taken`` ``(index,)`` int64 is scratch.
    """
    own = current_processor()
    if atomic_load(base + 8 * (_PLACES + index)) != own:
        atomic_store(base + 8 * (_PLACES + index), own)
    shared = False
    for i in range(index):
        taken[i] = atomic_load(base + 8 * (_PLACES + i))
        shared = shared or taken[i] == own
    if shared:
        move_off(taken)
    return bool(shared)


@numba.njit(nogil=True, cache=True)
def _called(base: int, index: int, seen: int, spins: int, taken: Any) -> bool:
    """Wait, yielding, for another job than ``seen``; False if there is none after ``spins`` yields."""
    tried = False
    for _ in range(spins):
        if atomic_load(base + 8 * CALL) != seen:
            return True
        yield_cpu()
        tried = tried or keep_apart(base, index, taken)
    return bool(atomic_load(base + 8 * CALL) != seen)


@numba.njit(nogil=True, cache=True)
def _help(job: Any, base: int, index: int, spins: int) -> None:
    """Join every job: spin for the next, then sleep, until told to stop."""
    seen = 0
    taken = np.empty(index, np.int64)
    while True:
        if not _called(base, index, seen, spins, taken):
            atomic_store(base + 8 * (_PLACES + index), -1)
            atomic_add(base + 8 * SLEEPING, 1)
            while atomic_load(base + 8 * CALL) == seen and atomic_load(base + 8 * STOP) == 0:
                futex_wait(base + 8 * CALL, seen)
            atomic_add(base + 8 * SLEEPING, -1)
        if atomic_load(base + 8 * STOP) != 0:
            return
        seen = atomic_load(base + 8 * CALL)
        work(job, base)


@numba.njit(nogil=True, cache=True)
def _dismiss(base: int) -> None:
    """Ask all helpers to leave."""
    atomic_store(base + 8 * STOP, 1)
    atomic_add(base + 8 * CALL, 1)
    futex_wake(base + 8 * CALL, 1 << 30)


class Team:
    """``threads`` threads in all, the caller among them. One caller at a time."""

    def __init__(self, threads: int) -> None:
        # One word a cache line would be tidier; the words are touched once per 50 µs.
        self.job = np.zeros(JOB_WORDS + threads, dtype=np.int64)
        self.job[_PLACES:] = -1
        self.job[SIZE] = threads
        self.base = int(self.job.ctypes.data)
        self._helpers = [
            threading.Thread(target=_help, args=(self.job, self.base, index, _HELPER_SPINS), daemon=True)
            for index in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def size(self) -> int:
        """Threads in all."""
        return len(self._helpers) + 1

    def run(
        self, operand: int, operand_stride: int, weight: int, depth: int, out: int, out_stride: int,
        rows: int, panels: int, kernel: int = 0,
    ) -> None:  # fmt: skip
        """One product; addresses and strides in bytes, ``rows`` and ``panels`` as packed.

        ``kernel`` is the address of a compiled function for a chunk, 0 the vector kernel.
        """
        lead(
            self.job, self.base, operand, operand_stride, weight, depth, out, out_stride, rows, panels, kernel
        )

    def close(self) -> None:
        """Stop the helpers."""
        _dismiss(self.base)
        for helper in self._helpers:
            helper.join()
