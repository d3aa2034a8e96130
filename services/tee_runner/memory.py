"""Memory on cache lines and pages, for what kernels read and write in whole vectors of 64 bytes.

A vector that crosses two lines is two accesses: unmixing 4096 rows into memory of NumPy's own, which
begins 16 bytes into a line, took twice as long.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LINE: Final = 64
PAGE: Final = 4096


def on_lines(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised C-contiguous array that begins on a cache line."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(size + LINE, dtype=np.uint8)
    start = -int(memory.ctypes.data) % LINE
    array: NDArray[Any] = memory[start : start + size].view(kind).reshape(shape)
    return array


def pages(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zero C-contiguous array that begins on a page. The kernel commits it as it is written."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.zeros(size + PAGE, dtype=np.uint8)
    start = -int(memory.ctypes.data) % PAGE
    array: NDArray[Any] = memory[start : start + size].view(kind).reshape(shape)
    return array
