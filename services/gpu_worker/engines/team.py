"""A small team of threads that spin, yielding, between the jobs of one token.

A decode step hands the engine a new product every 100 µs or so. Waking a sleeping thread
costs about half of that, so helpers stay awake for a bounded while after each job and give
their core away whenever another thread wants it; after that they sleep until called.

When the team is as large as the machine, its last helper is a *reserve*: it sleeps between
jobs and is called to long ones only. On the same host the runner spins on a core while it
waits for a short job, and a spinning helper that shares that core with it comes too late.
"""

from __future__ import annotations

import os
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
    LANES,
    OPERAND,
    OPERAND_STRIDE,
    OUT,
    OUT_STRIDE,
    PANELS,
    RESERVE_CALL,
    RESERVE_SLEEPING,
    ROWS,
    SLEEPING,
    STOP,
    TICKET,
    WEIGHT,
    work,
)

# Yields before a helper sleeps: about a millisecond, longer than the gap between two offloads.
_HELPER_SPINS = 3000
# A job this long on one thread is worth waking the reserve for. The estimate takes the larger
# of arithmetic at 150 GFLOP/s and reading the weights at 15 GB/s.
_RESERVE_SECONDS = 5e-5
_FLOPS, _BYTES_PER_SECOND = 1.5e11, 1.5e10


@numba.njit(nogil=True, cache=True)
def _lead(
    job: Any, base: int, epoch: int, operand: int, operand_stride: int, weight: int, depth: int,
    out: int, out_stride: int, rows: int, panels: int, chunk: int, kernel: int, reserve: bool,
) -> None:  # fmt: skip
    """Publish a job, call the helpers, do a share of it, and wait for theirs."""
    chunks = -(-panels // chunk)
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
    if reserve:
        atomic_store(base + 8 * RESERVE_CALL, epoch)
        if atomic_load(base + 8 * RESERVE_SLEEPING) > 0:
            futex_wake(base + 8 * RESERVE_CALL, 1)
    work(job, base)
    while atomic_load(base + 8 * DONE) != chunks:
        yield_cpu()


@numba.njit(nogil=True, cache=True)
def _help(job: Any, base: int, call: int, sleeping: int, spins: int) -> None:
    """Join the jobs that change word ``call``: spin for it, then sleep, until told to stop."""
    seen = 0
    while True:
        if not spin_while_equal(base + 8 * call, seen, spins):
            atomic_add(base + 8 * sleeping, 1)
            while atomic_load(base + 8 * call) == seen and atomic_load(base + 8 * STOP) == 0:
                futex_wait(base + 8 * call, seen)
            atomic_add(base + 8 * sleeping, -1)
        if atomic_load(base + 8 * STOP) != 0:
            return
        seen = atomic_load(base + 8 * call)
        work(job, base)


@numba.njit(nogil=True, cache=True)
def _dismiss(base: int) -> None:
    """Ask all helpers to leave."""
    atomic_store(base + 8 * STOP, 1)
    for call in (CALL, RESERVE_CALL):
        atomic_add(base + 8 * call, 1)
        futex_wake(base + 8 * call, 1 << 30)


class Team:
    """``threads`` threads in all, the caller among them. One caller at a time."""

    def __init__(self, threads: int) -> None:
        reserve = threads > 1 and threads >= len(os.sched_getaffinity(0))
        # One word a cache line would be tidier; the words are touched once per 50 µs.
        self._job = np.zeros(JOB_WORDS, dtype=np.int64)
        self._base = int(self._job.ctypes.data)
        self._epoch = 0
        self._has_reserve = reserve
        spinning = max(0, threads - 1 - int(reserve))
        roles = [(CALL, SLEEPING, _HELPER_SPINS)] * spinning
        roles += [(RESERVE_CALL, RESERVE_SLEEPING, 0)] * int(reserve)
        self._helpers = [
            threading.Thread(target=_help, args=(self._job, self._base, *role), daemon=True) for role in roles
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
        self._epoch = (self._epoch + 1) & 0x3FFFFFFF
        chunk = max(1, min(64, panels // (4 * self.size)))
        chunk = -(-chunk // 8) * 8 if panels >= 32 * self.size else chunk
        if kernel:
            chunk = -(-chunk // 4) * 4
        reserve = self._has_reserve and _single_thread_seconds(rows, depth, panels) > _RESERVE_SECONDS
        _lead(
            self._job, self._base, self._epoch, operand, operand_stride, weight, depth, out,
            out_stride, rows, panels, chunk, kernel, reserve,
        )  # fmt: skip

    def close(self) -> None:
        """Stop the helpers."""
        _dismiss(self._base)
        for helper in self._helpers:
            helper.join()


def _single_thread_seconds(rows: int, depth: int, panels: int) -> float:
    weights = depth * panels * LANES
    return max(2 * rows * weights / _FLOPS, 2 * weights / _BYTES_PER_SECOND)
