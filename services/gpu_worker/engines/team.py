"""A small team of threads that spin, yielding, between the jobs of one token.

A decode step hands the engine a new product every 100 µs or so. Waking a sleeping thread
costs about half of that, so helpers stay awake for a bounded while after each job and give
their core away whenever another thread wants it; after that they sleep until called.
"""

from __future__ import annotations

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


@numba.njit(nogil=True, cache=True)
def _lead(
    job: Any, base: int, epoch: int, operand: int, operand_stride: int, weight: int, depth: int,
    out: int, out_stride: int, rows: int, panels: int, chunk: int,
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
    atomic_store(base + 8 * DONE, 0)  # type: ignore[call-arg]
    atomic_store(base + 8 * CHUNKS, (epoch << 32) | chunks)  # type: ignore[call-arg]
    atomic_store(base + 8 * TICKET, epoch << 32)  # type: ignore[call-arg]
    return atomic_load(base + 8 * SLEEPING)  # type: ignore[call-arg, no-any-return]


@numba.njit(nogil=True, cache=True)
def _finish(job: Any, base: int) -> None:
    """The leader's share of the job, then wait for the helpers' chunks."""
    work(job, base)
    chunks = atomic_load(base + 8 * CHUNKS) & 0xFFFFFFFF  # type: ignore[call-arg]
    while atomic_load(base + 8 * DONE) != chunks:  # type: ignore[call-arg]
        yield_cpu()  # type: ignore[call-arg]


@numba.njit(nogil=True, cache=True)
def _help(job: Any, base: int, seen: int, spins: int) -> int:
    """Join jobs until none came for ``spins`` yields; returns the last chunk count word seen."""
    while atomic_load(base + 8 * STOP) == 0:  # type: ignore[call-arg]
        if not spin_while_equal(base + 8 * CHUNKS, seen, spins):
            return seen
        seen = atomic_load(base + 8 * CHUNKS)  # type: ignore[call-arg]
        work(job, base)
    return seen


@numba.njit(nogil=True, cache=True)
def _announce(base: int, delta: int) -> None:
    atomic_add(base + 8 * SLEEPING, delta)  # type: ignore[call-arg]


class Team:
    """``threads`` threads in all, the caller among them. One caller at a time."""

    def __init__(self, threads: int) -> None:
        # One word a cache line would be tidier; the words are touched once per 50 µs.
        self._job = np.zeros(JOB_WORDS, dtype=np.int64)
        self._base = int(self._job.ctypes.data)
        self._epoch = 0
        self._wake = threading.Semaphore(0)
        self._helpers = [
            threading.Thread(target=self._helper, name=f"gelo-gemm-{i}", daemon=True)
            for i in range(max(0, threads - 1))
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def size(self) -> int:
        """Threads in all."""
        return len(self._helpers) + 1

    def run(
        self, operand: int, operand_stride: int, weight: int, depth: int, out: int, out_stride: int,
        rows: int, panels: int,
    ) -> None:  # fmt: skip
        """One product; addresses and strides in bytes, ``rows`` and ``panels`` as packed."""
        self._epoch = (self._epoch + 1) & 0x3FFFFFFF
        chunk = max(1, min(64, panels // (4 * self.size)))
        chunk = -(-chunk // 8) * 8 if panels >= 32 * self.size else chunk
        sleeping = _lead(
            self._job, self._base, self._epoch, operand, operand_stride, weight, depth, out,
            out_stride, rows, panels, chunk,
        )  # fmt: skip
        if sleeping:
            self._wake.release(sleeping)
        _finish(self._job, self._base)

    def close(self) -> None:
        """Stop the helpers."""
        store_word(self._base + 8 * STOP, 1)
        for _ in self._helpers:
            self._wake.release()
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
