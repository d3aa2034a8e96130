"""Memory on cache lines and pages, for what kernels read and write in whole vectors of 64 bytes.

A vector that crosses two lines is two accesses: unmixing 4096 rows into memory of NumPy's own, which
begins 16 bytes into a line, took twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LINE: Final = 64
PAGE: Final = 4096


def on_lines(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An uninitialised C-contiguous array that begins on a cache line."""
    return _beginning_on(LINE, np.empty, shape, np.dtype(dtype))


def pages(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zero C-contiguous array that begins on a page. The kernel commits it as it is written."""
    return _beginning_on(PAGE, np.zeros, shape, np.dtype(dtype))


def _beginning_on(
    boundary: int, allocate: Callable[..., NDArray[Any]], shape: int | tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = allocate(size + boundary, dtype=np.uint8)
    start = -int(memory.ctypes.data) % boundary
    return memory[start : start + size].view(dtype).reshape(shape)
