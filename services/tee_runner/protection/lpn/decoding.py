"""Information set decoding (ISD) of one binary code whose error comes in two parts: the instance, Prange.

The instance: a random binary code of length n and dimension k, an error of known weight w_1 at
uniform positions of a first part of length n_1 and w_2 in a second of length n_2, n = n_1 + n_2. With
an empty second part it is plain syndrome decoding. List-based algorithms are in ``lists``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import lgamma, log, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A cost that no attack has: stands for a point that is not a valid choice.
IMPOSSIBLE = 1e6
# log2 of an empty set's size, finite so that differences of two stay numbers.
_EMPTY = -1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A decoding instance: ``dimension`` of the code, and length and weight of the two parts.

    Raises:
        ValueError: the numbers describe no instance.
    """

    dimension: int
    lengths: tuple[int, int]
    weights: tuple[int, int]

    def __post_init__(self) -> None:
        if not 0 < self.dimension < self.length:
            raise ValueError(f"a code of length {self.length} has no dimension {self.dimension}")
        if any(not 0 <= w <= n for n, w in zip(self.lengths, self.weights, strict=True)):
            raise ValueError(f"weights {self.weights} do not fit lengths {self.lengths}")

    @classmethod
    def uniform(cls, length: int, dimension: int, weight: int) -> Instance:
        """Plain syndrome decoding: one part."""
        return cls(dimension=dimension, lengths=(length, 0), weights=(weight, 0))

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @property
    def weight(self) -> int:
        return sum(self.weights)

    @property
    def log2_supports(self) -> float:
        """log2 of the number of errors: C(n_1, w_1)·C(n_2, w_2)."""
        return sum(log2_binomial(n, w) for n, w in zip(self.lengths, self.weights, strict=True))


@dataclass(frozen=True, slots=True)
class Cost:
    """log2 of bit operations and of bits of memory, and the attack's parameters that reach them."""

    bits: float
    memory: float
    parameters: dict[str, int] = field(default_factory=dict)


@lru_cache(maxsize=4)
def _log2_factorials(size: int) -> Floats:
    """``[i]``: log2 (i/2)!, for i < size."""
    return np.array([lgamma(i / 2 + 1) for i in range(size)]) / log(2)


class Binomials:
    """log2 of binomial coefficients, vectorised, for arguments up to a code's length."""

    def __init__(self, length: int) -> None:
        self.table = _log2_factorials(1 << (2 * length).bit_length())

    def __call__(self, n: Any, k: Any) -> Floats:
        """log2 C(n/2, k/2), -1e7 where it is 0. Both arguments are doubled, to allow halves."""
        rest, take = n - k, self.table.take
        value = take(n, mode="clip") - take(k, mode="clip") - take(rest, mode="clip")
        return np.where((k < 0) | (rest < 0), _EMPTY, value)


def log2_binomial(n: int, k: int) -> float:
    """log2 of C(n, k); -inf where it is 0."""
    if not 0 <= k <= n:
        return -float("inf")
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


@lru_cache(maxsize=4096)
def log2_elimination(length: int, dimension: int) -> float:
    """log2 of the steps of a Gaussian elimination by M4RI with its best block size (Bard 2007)."""
    rows = length - dimension
    return min(
        log2((r * r + 2**r + max(0, rows - r)) * ((length + r - 1) // r)) for r in range(1, min(rows, 24) + 1)
    )


def prange(instance: Instance) -> Cost:
    """Prange 1962: draw information sets until one is free of errors."""
    (n1, n2), (w1, w2), k = instance.lengths, instance.weights, instance.dimension
    inside = np.arange(max(0, k - n2), min(n1, k) + 1)
    binomial = Binomials(instance.length)
    success = binomial(2 * (n1 - inside), 2 * w1) + binomial(2 * (n2 - k + inside), 2 * w2)
    best = int(np.argmax(success))
    tries = instance.log2_supports - float(success[best])
    step = log2_elimination(instance.length, k) + log2(instance.length)
    memory = log2(instance.length) + log2(instance.length - k)
    return Cost(min(IMPOSSIBLE, max(0.0, tries) + step), memory, {"K1": int(inside[best])})
