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
from gelo.atomics import atomic_add, atomic_load, atomic_store, spin_while_equal, store_word, yield_cpu

from gpu_worker.engines.microkernel import (
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
_RESERVE_SECONDS = 5e-4
_FLOPS, _BYTES_PER_SECOND = 1.5e11, 1.5e10


@numba.njit(nogil=True, cache=True)
def _lead(
    job: Any, base: int, epoch: int, operand: int, operand_stride: int, weight: int, depth: int,
    out: int, out_stride: int, rows: int, panels: int, chunk: int, kernel: int,
) -> int:  # fmt: skip
    """Publish a job; returns how many helpers sleep."""
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
    return atomic_load(base + 8 * SLEEPING)


@numba.njit(nogil=True, cache=True)
def _finish(job: Any, base: int) -> None:
    """The leader's share of the job, then wait for the helpers' chunks."""
    work(job, base)
    chunks = atomic_load(base + 8 * CHUNKS) & 0xFFFFFFFF
    while atomic_load(base + 8 * DONE) != chunks:
        yield_cpu()


@numba.njit(nogil=True, cache=True)
def _help(job: Any, base: int, seen: int, spins: int) -> int:
    """Join jobs until none came for ``spins`` yields; returns the last chunk count word seen."""
    while atomic_load(base + 8 * STOP) == 0:
        if not spin_while_equal(base + 8 * CHUNKS, seen, spins):
            return seen
        seen = atomic_load(base + 8 * CHUNKS)
        work(job, base)
    return seen


@numba.njit(nogil=True, cache=True)
def _announce(base: int, delta: int) -> None:
    atomic_add(base + 8 * SLEEPING, delta)


class Team:
    """``threads`` threads in all, the caller among them. One caller at a time."""

    def __init__(self, threads: int) -> None:
        reserve = threads > 1 and threads >= len(os.sched_getaffinity(0))
        # One word a cache line would be tidier; the words are touched once per 50 µs.
        self._job = np.zeros(JOB_WORDS, dtype=np.int64)
        self._base = int(self._job.ctypes.data)
        self._epoch = 0
        self._wake = threading.Semaphore(0)
        self._wake_reserve = threading.Semaphore(0) if reserve else None
        spinning = max(0, threads - 1 - int(reserve))
        self._helpers = [
            threading.Thread(target=self._helper, name=f"gelo-gemm-{i}", daemon=True) for i in range(spinning)
        ]
        if reserve:
            self._helpers.append(
                threading.Thread(target=self._reserve, name="gelo-gemm-reserve", daemon=True)
            )
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
        sleeping = _lead(
            self._job, self._base, self._epoch, operand, operand_stride, weight, depth, out,
            out_stride, rows, panels, chunk, kernel,
        )  # fmt: skip
        if sleeping:
            self._wake.release(sleeping)
        if self._wake_reserve is not None and _single_thread_seconds(rows, depth, panels) > _RESERVE_SECONDS:
            self._wake_reserve.release()
        _finish(self._job, self._base)

    def close(self) -> None:
        """Stop the helpers."""
        store_word(self._base + 8 * STOP, 1)
        for _ in self._helpers:
            self._wake.release()
        if self._wake_reserve is not None:
            self._wake_reserve.release()
        for helper in self._helpers:
            helper.join()

    def _helper(self) -> None:
        seen = 0
        while not self._job[STOP]:
            seen = _help(self._job, self._base, seen, _HELPER_SPINS)
            _announce(self._base, 1)
            # A job published between the last look and the announcement is done by the
            # others; this helper only joins the next one.
            self._wake.acquire()
            _announce(self._base, -1)

    def _reserve(self) -> None:
        wake = self._wake_reserve
        while wake is not None and wake.acquire() and not self._job[STOP]:
            work(self._job, self._base)


def _single_thread_seconds(rows: int, depth: int, panels: int) -> float:
    weights = depth * panels * LANES
    return max(2 * rows * weights / _FLOPS, 2 * weights / _BYTES_PER_SECOND)
