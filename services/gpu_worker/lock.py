"""The lock that serialises an engine, and tells who holds it that others wait."""

from __future__ import annotations

import threading
from types import TracebackType

import numpy as np


class EngineLock:
    """A reentrant lock. ``wanted`` is the address of an int64: how many threads wait for it.

    A compiled loop that holds the lock for long looks there and gives way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._guard = threading.Lock()
        self._waiting = np.zeros(1, dtype=np.int64)
        self.wanted = int(self._waiting.ctypes.data)

    def _count(self, change: int) -> None:
        with self._guard:
            self._waiting[0] += change

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        self._count(1)
        try:
            self._lock.acquire()
        finally:
            self._count(-1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
