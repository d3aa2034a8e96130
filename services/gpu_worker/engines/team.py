"""A small team of threads that spin, yielding, between the jobs of one token.

A decode step hands the engine a new product every 100 µs or so. Waking a sleeping thread
costs about half of that, so helpers stay awake for a bounded while after each job and give
their core away whenever another thread wants it; after that they sleep until called.

Threads are not pinned. On a quiet machine that would save some time, but a pinned thread that
yields to another program's on its processor waits for a whole time slice of it, at every offload.
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
    spin_while_equal,
    yield_cpu,
)
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


@numba.njit(nogil=True, cache=True)
def lead(
    job: Any, base: int, operand: int, operand_stride: int, weight: int, depth: int, out: int,
    out_stride: int, rows: int, panels: int, kernel: int,
) -> None:  # fmt: skip
    """Publish a job, call the helpers, do a share of it, and wait for theirs. See :meth:`Team.run`."""
    epoch = (atomic_load(base + 8 * CALL) + 1) & _EPOCHS
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
def _help(job: Any, base: int, spins: int) -> None:
    """Join every job: spin for the next, then sleep, until told to stop."""
    seen = 0
    while True:
        if not spin_while_equal(base + 8 * CALL, seen, spins):
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
        self.job = np.zeros(JOB_WORDS, dtype=np.int64)
        self.job[SIZE] = threads
        self.base = int(self.job.ctypes.data)
        self._helpers = [
            threading.Thread(target=_help, args=(self.job, self.base, _HELPER_SPINS), daemon=True)
            for _ in range(1, threads)
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
