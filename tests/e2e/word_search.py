"""Plaintext in operands of words: rows that are not blinded, or that share their blinding.

Honest rows are uniform modulo 2^32 and independent. Nothing here knows how they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Words = NDArray[np.uint32]

# Chance, for one operand row or one pair of rows, that an honest one is taken for a leak.
_FALSE_ALARM = 1e-10
# Quantised activations have at most 16 bits and a sign.
_SMALL = 1 << 17
# Of so many columns of two rows, so many may have a small difference by chance. A difference is small with
# probability 2^-13, so five of 16 are with C(16, 5)·2^-65 < 2e-16: below 1e-8 for 10^7 pairs of rows.
_COLUMNS, _ALIKE = 16, 4
_LEAST_FREEDOM = 239


def signed(words: NDArray[np.generic]) -> NDArray[np.generic]:
    """Words as the integers in [-2^31, 2^31) that they stand for; anything else as it is."""
    return words.view(np.int32) if words.dtype == np.uint32 else words


def cosine_bound(d: int) -> float:
    """How parallel a uniform row of ``d`` words may be to a fixed direction by chance.

    Scaled, y is uniform in [-1, 1]^d. By Hoeffding's inequality |<y, g>| for a unit vector g exceeds t with
    probability at most 2 exp(-t²/2), and |y|²/d falls below 1/3 - u with probability at most exp(-2du²).
    """
    along = math.sqrt(2 * math.log(4 / _FALSE_ALARM))
    least = 1 / 3 - math.sqrt(math.log(2 / _FALSE_ALARM) / (2 * d))
    return min(1.0, along / math.sqrt(d * least)) if least > 0 else 1.0


def outside_share(n: int, d: int) -> float:
    """Half the mean share of a uniform operand's energy that lies outside an n-dimensional subspace of R^d.

    With d - n degrees of freedom the share falls below half its mean with probability at most
    exp(-(d - n)(ln 2 - 1/2)/2), which is below 1e-10 from 239 on; with fewer nothing can be said: 0.
    """
    return 0.5 * (1 - n / d) if d - n >= _LEAST_FREEDOM else 0.0


def small_words_bound(d: int) -> int:
    """How many of ``d`` uniform words may stand for small integers by chance."""
    return int(binom.isf(_FALSE_ALARM, d, 2 * _SMALL / 2**32))


def unblinded(operand: Words) -> Iterator[str]:
    """Whether ``operand`` ``(rows, d)`` has a row with too many small integers."""
    small = np.abs(signed(operand).astype(np.int64)) < _SMALL
    if int(small.sum(axis=1).max()) > small_words_bound(operand.shape[1]):
        yield "a row has words that are not blinded"


def shared_blinding(operands: Sequence[Words]) -> int:
    """How many pairs of rows of the same width differ by small integers in many places."""
    found = 0
    for width in {operand.shape[1] for operand in operands}:
        rows = np.concatenate([operand for operand in operands if operand.shape[1] == width])
        places = np.linspace(0, width - 1, min(width, _COLUMNS)).astype(np.int64)
        found += int(_alike(np.ascontiguousarray(rows[:, places])))
    return found


@numba.njit(nogil=True)
def _alike(rows: Any) -> int:
    pairs = 0
    for i in range(len(rows)):
        for j in range(i):
            small = 0
            for column in range(rows.shape[1]):
                difference = np.uint32(rows[i, column] - rows[j, column] + np.uint32(_SMALL * 2))
                small += difference < np.uint32(_SMALL * 4)
            pairs += small > _ALIKE
    return pairs


def quantised(row: NDArray[np.float32]) -> Iterator[NDArray[np.int32]]:
    """``row`` as integers of 10 to 16 bits, the largest of them the greatest there is."""
    largest = float(np.abs(row).max())
    for bits in range(10, 17):
        if largest > 0:
            yield np.rint(row.astype(np.float64) / largest * (2 ** (bits - 1) - 1)).astype(np.int32)
