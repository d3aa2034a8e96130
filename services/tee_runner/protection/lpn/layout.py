"""Column panels: how pools, weights and blinding rows lie in memory."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.memory import PAGE, pages

LANES: Final = 16  # columns of a panel, one vector of 32-bit words
TILE_ROWS: Final = 64  # rows that are swept together
TILE_BYTES: Final = TILE_ROWS * LANES * 4
assert TILE_BYTES == PAGE  # noqa: S101 - a fact about this module, checked at import


def panels_of(columns: int) -> int:
    """Panels that hold ``columns`` columns."""
    return -(-columns // LANES)


def rows_per_page(item_bytes: int) -> int:
    """Rows of a panel in one page."""
    return PAGE // (LANES * item_bytes)


def empty_panels(rows: int, columns: int, dtype: Any) -> NDArray[Any]:
    """Zero panels ``(panels, rows up to a whole page, 16)`` of a ``(rows, columns)`` matrix."""
    whole = rows_per_page(np.dtype(dtype).itemsize)
    return pages((panels_of(columns), -(-rows // whole) * whole, LANES), dtype)


@numba.njit(nogil=True, cache=True, parallel=True)
def pack_rows(rows: Any, panels: Any, first: int) -> None:
    """Rows ``first`` and following of ``panels`` ``(p, m, 16)`` from ``rows`` ``(n, columns)``.

    Each element of ``rows``, which may be memory that others write, is read once.
    """
    columns = rows.shape[1]
    for p in numba.prange(panels.shape[0]):
        width = min(LANES, columns - p * LANES)
        for i in range(rows.shape[0]):
            for c in range(width):
                panels[p, first + i, c] = rows[i, p * LANES + c]


@numba.njit(nogil=True, cache=True, parallel=True)
def unpack_rows(panels: Any, first: int, rows: Any) -> None:
    """``rows`` ``(n, columns)`` from rows ``first`` and following of ``panels``."""
    columns = rows.shape[1]
    for p in numba.prange(panels.shape[0]):
        width = min(LANES, columns - p * LANES)
        for i in range(rows.shape[0]):
            for c in range(width):
                rows[i, p * LANES + c] = panels[p, first + i, c]


@numba.njit(nogil=True, cache=True, parallel=True)
def pack_transposed(weight: Any, panels: Any, first: int) -> None:
    """Panels of weightᵀ: columns ``first`` and following, a multiple of 16, from ``weight`` ``(n, rows)``."""
    for p in numba.prange(-(-weight.shape[0] // LANES)):
        width = min(LANES, weight.shape[0] - p * LANES)
        own = panels[first // LANES + p]
        for i in range(weight.shape[1]):
            for c in range(width):
                own[i, c] = weight[p * LANES + c, i]
