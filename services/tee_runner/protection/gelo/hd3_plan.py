"""Which pass of the HD3 cascade works on which rows of a tile, and how tiles are laid out."""

from __future__ import annotations

import numba

from tee_runner.protection.gelo.tiles import LANES, LINE

# A tile's rows are padded by one vector per group of the first pass: without that, rows of the
# later passes are a multiple of 4 KiB apart and compete for one set of the L1 cache.
_MIN_RADIX = 8


@numba.njit(nogil=True, cache=True)
def tile_floats(s: int, width: int) -> int:
    """Size of a padded tile; 0 where registers are enough."""
    return 0 if s == LANES else s * width + s // _MIN_RADIX * LANES


@numba.njit(nogil=True, cache=True)
def pass_count(s: int) -> int:
    """Passes of one transform: log₂s in digits of at most 4 bits."""
    bits = 0
    while 1 << bits < s:
        bits += 1
    return (bits + 3) // 4


@numba.njit(nogil=True, cache=True)
def radix_of(s: int, index: int) -> int:
    """Radix of a pass; larger ones first, 16 and 8 but for s = 32 = 8·4."""
    bits = 0
    while 1 << bits < s:
        bits += 1
    passes = (bits + 3) // 4
    return 1 << (bits // passes + (1 if index < bits % passes else 0))


@numba.njit(nogil=True, cache=True)
def row_step(span: int, leading: int, width: int) -> int:
    """Bytes between rows ``span`` apart in the padded tile."""
    return span * width * 4 + span // leading * LINE


@numba.njit(nogil=True, cache=True)
def span_of(s: int, index: int) -> int:
    """Rows between the rows of a pass: the product of the radices before it."""
    span = 1
    for j in range(index):
        span *= radix_of(s, j)
    return span


@numba.njit(nogil=True, cache=True)
def last_pass(s: int) -> int:
    """The pass that ends the cascade: on neighbouring rows where there are three or more.

    Neighbouring rows of the operand are in different sets of the caches, rows a power of two
    apart are not.
    """
    passes = pass_count(s)
    return 0 if passes > 2 else passes - 1
