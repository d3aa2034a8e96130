"""Cost of information set decoding (ISD) of one binary code whose error comes in two parts.

The instance: a random binary code of length n and dimension k, an error of known weight w_1 at
uniform positions of a first part of length n_1 and w_2 in a second of length n_2, n = n_1 + n_2. With
an empty second part it is plain syndrome decoding.

Two cost models, both with free memory access, M4RI elimination and merging by hashing:

* ``early_abort=False``: that of Esser and Bellini, "Syndrome Decoding Estimator", PKC 2022 (ePrint
  2021/1243), in which the published figures for Classic McEliece, BIKE and HQC are. A step is an addition of
  two vectors of n bits; bit operations = steps · n.
* ``early_abort=True``: that of Bernstein, Lange and Peters, "Attacking and defending the McEliece
  cryptosystem", PQCrypto 2008, section 4. Lists hold labels of l bits, built by partial sums; a
  candidate's further bits are computed one by one until its weight is too large, about twice the
  allowed weight. Below the first by up to log2(n/l), 4 to 7 bits.

An iteration draws K positions, K_1 of them in the first part: K_1 is a parameter of the attack, which
is how it uses the two weights. Lists are built in one of two ways, whichever is cheaper: *mixed*,
patterns with p errors in each half of the K positions, however they fall into the parts (never worse
than ignoring the parts altogether, and equal to it in a one-part instance); *split*, patterns with
p_1 errors in each half of the K_1 and p_2 in each half of the K_2 positions.

Deviations, both in the attacker's favour and below a bit: the number of representations is not
rounded to a power of two, and an odd weight is halved by the gamma function. Trees of depth 3 and
nearest-neighbour searches (May-Ozerov, Both-May) are not searched. By CryptographicEstimators
2.1.1 depth 3 is 0.5 bits below depth 2 at Classic McEliece 348864, 2.4 at 6688128, and not below at
BIKE-1 and HQC-1; May-Ozerov is 1.6 below at 348864.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import lgamma, log, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Point = tuple[int, ...]

# A cost that no attack has: stands for a point that is not a valid choice.
IMPOSSIBLE = 1e6
# The most errors per half that are tried. Best values are far below (24 at Classic McEliece 6688) where
# costs are of interest; lists of more are longer than 2^400.
LARGEST_P = 128
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


class _Binomials:
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
    binomial = _Binomials(instance.length)
    success = binomial(2 * (n1 - inside), 2 * w1) + binomial(2 * (n2 - k + inside), 2 * w2)
    best = int(np.argmax(success))
    tries = instance.log2_supports - float(success[best])
    step = log2_elimination(instance.length, k) + log2(instance.length)
    memory = log2(instance.length) + log2(instance.length - k)
    return Cost(min(IMPOSSIBLE, max(0.0, tries) + step), memory, {"K1": int(inside[best])})


class _Search:
    """What the list-based algorithms share. A point holds ``(p1, p2, ..., l, shift)`` as its row.

    ``shift`` moves K_1 from where both parts have the same rate of errors outside the K positions.
    In a ``mixed`` search p1 counts the errors of both parts and p2 is 0.
    """

    def __init__(self, instance: Instance, *, mixed: bool, early_abort: bool) -> None:
        self.lengths, self.weights, self.k = instance.lengths, instance.weights, instance.dimension
        self.n, self.weight = instance.length, instance.weight
        self.redundancy = self.n - self.k
        self.supports = instance.log2_supports
        self.elimination = log2_elimination(self.n, self.k)
        self.two_parts = instance.lengths[1] > 0
        self.binomial = _Binomials(self.n)
        self.mixed, self.early_abort = mixed, early_abort
        self.bits = log2(self.n)

    def draw(self, K: Any, p1: Ints, p2: Ints, shift: Ints) -> tuple[Ints, Ints]:
        """K_1 and K_2 of a draw of K positions."""
        (n1, n2), (w1, w2) = self.lengths, self.weights
        if not self.two_parts:
            return K + 0 * p1, 0 * p1
        rest1, rest2 = np.full(p1.shape, float(w1)), np.full(p1.shape, float(w2))
        if not self.mixed:
            rest1, rest2 = np.maximum(w1 - 2 * p1, 0.5), np.maximum(w2 - 2 * p2, 0.5)
        inside = n1 - np.rint((self.n - K) * rest1 / (rest1 + rest2)).astype(np.int64) + shift
        K1 = np.clip(inside, np.maximum(0, K - n2), np.minimum(n1, K))
        return K1, K - K1

    def parts(self, first: Ints, second: Ints, K1: Ints, K2: Ints) -> list[tuple[Ints, Ints]]:
        """Which choices a list is made of: counts of errors in sets of positions."""
        return [(first, K1 + K2)] if self.mixed else [(first, K1), (second, K2)]

    def success(self, p1: Ints, p2: Ints, K1: Ints, K2: Ints) -> Floats:
        """log2 of the probability that a draw has the pattern: p errors in each half."""
        (n1, n2), (w1, w2) = self.lengths, self.weights
        if not self.mixed or not self.two_parts:
            total = 2 * (self.binomial(K1, 2 * p1) + self.binomial(K2, 2 * p2))
            total += self.binomial(2 * (n1 - K1), 2 * (w1 - 2 * p1))
            total += self.binomial(2 * (n2 - K2), 2 * (w2 - 2 * p2))
            return np.minimum(total - self.supports, 0.0)
        a = np.arange(min(w1, 2 * int(p1.max(initial=0))) + 1)
        b, K1, K2 = 2 * p1[:, None] - a, K1[:, None], K2[:, None]
        ways = self.binomial(2 * K1, 2 * a) + self.binomial(2 * K2, 2 * b)
        ways += self.binomial(2 * (n1 - K1), 2 * (w1 - a)) + self.binomial(2 * (n2 - K2), 2 * (w2 - b))
        weight = np.logaddexp2.reduce(ways, axis=1) - self.supports
        K = (K1 + K2)[:, 0]
        halves = 2 * self.binomial(K, 2 * p1) - self.binomial(2 * K, 4 * p1)
        both: Floats = np.minimum(weight + halves, 0.0)
        return both

    def finish(
        self, lists: Floats, candidates: Floats, columns: Ints, success: Floats, p: Ints, window: Ints
    ) -> Floats:
        """log2 of bit operations of all iterations.

        ``lists`` and ``candidates``: log2 of the steps spent on lists in an iteration, and of the
        candidates for the whole pattern; ``columns``: how many columns a candidate adds up.
        """
        if self.early_abort:
            abort = np.log2(2.0 * np.maximum(self.weight - 2 * p + 1, 1) * np.maximum(columns, 1))
            work = np.logaddexp2(
                lists + np.log2(np.maximum(window, 1)), candidates + np.minimum(abort, self.bits)
            )
        else:
            work = np.logaddexp2(lists, candidates) + self.bits
        total = np.logaddexp2(self.elimination + self.bits, work) - success
        valid = (total < IMPOSSIBLE) & (window >= 0) & (window < self.redundancy) & (p <= LARGEST_P)
        bits: Floats = np.where(valid, total, IMPOSSIBLE)
        return bits

    def starts(self) -> list[tuple[int, int]]:
        """Pairs (p_1, p_2) the descent may start from: small ones, then ever sparser."""
        steps = (0, 1, 2, 3, 5, 7, 10, 14, 20, 28, 40, 56)
        limits = (self.weight, 0) if self.mixed else self.weights
        first, second = (
            sorted({p for p in (*steps, w // 2, w // 2 - 4) if 0 <= 2 * p <= min(w, 2 * LARGEST_P)})
            for w in limits
        )
        return list(product(first, second))

    def minimise(
        self,
        cost: Callable[[Ints], Floats],
        seeds: Sequence[tuple[int, ...]],
        steps: Sequence[tuple[int, ...]],
    ) -> tuple[float, tuple[int, ...]]:
        """The least cost found by descent from the best seeds, and its point.

        All points one step away in any combination of coordinates are tried at once; ``steps``
        gives ever smaller step sizes per coordinate.
        """
        points = np.array(seeds, dtype=np.int64)
        values = cost(points)
        best_value, best_point = IMPOSSIBLE, points[0]
        for start in np.argsort(values, kind="stable")[:2]:
            value, point = float(values[start]), points[start]
            for step in steps:
                offsets = _offsets(step)
                while True:
                    around = point + offsets
                    found = cost(around)
                    least = int(np.argmin(found))
                    if found[least] >= value:
                        break
                    value, point = float(found[least]), around[least]
            if value < best_value:
                best_value, best_point = value, point
        return best_value, tuple(int(x) for x in best_point)


@lru_cache(maxsize=64)
def _offsets(step: Point) -> Ints:
    """Every combination of 0 and ± step per coordinate; a step of 0 leaves it alone.

    For the window, second from last, a step of 1 also means ± 3 and 7: one error more takes several
    bits more.
    """
    choices: list[Point] = [(0, -s, s) if s else (0,) for s in step]
    if step[-2] == 1:
        choices[-2] = (0, -1, 1, -3, 3, -7, 7)
    return np.array(list(product(*choices)), dtype=np.int64)


def stern(instance: Instance, *, early_abort: bool = False) -> Cost:
    """Stern 1989 and Dumer 1991: the better of the two.

    Stern: p errors in each half of an information set, none in a window of l further positions;
    several windows per elimination (Bernstein, Lange and Peters 2008). Dumer: p errors in each half
    of k + l positions.
    """
    ways = product(_ways(instance), (False, True))
    return min((_stern(instance, mixed, extended, early_abort) for mixed, extended in ways), key=_bits)


def _bits(cost: Cost) -> float:
    return cost.bits


def _ways(instance: Instance) -> tuple[bool, ...]:
    """Values of ``mixed`` worth trying: they are the same thing in a one-part instance."""
    return (True, False) if all(instance.lengths) and all(instance.weights) else (True,)


def _stern(instance: Instance, mixed: bool, extended: bool, early_abort: bool) -> Cost:
    search = _Search(instance, mixed=mixed, early_abort=early_abort)

    def evaluate(points: Ints) -> tuple[Floats, Floats]:
        p1, p2, window, shift = points.T
        p = p1 + p2
        K1, K2 = search.draw(search.k + extended * window, p1, p2, shift)
        size = np.zeros(p1.shape)
        for errors, K in search.parts(p1, p2, K1, K2):
            size = size + search.binomial(K, 2 * errors)
        windows = np.zeros(p1.shape)
        if not extended:
            outside, r = 2 * (search.weight - 2 * p), search.redundancy
            windows = search.binomial(2 * r, outside) - search.binomial(2 * (r - window), outside)
        success = search.success(p1, p2, K1, K2)
        lists, candidates = windows + size + 1, windows + 2 * size - window
        return search.finish(lists, candidates, 2 * p - 1, success, p, window), size

    both, two = int(not mixed), int(search.two_parts)
    steps = [(1, both, 8, 64 * two), (1, both, 3, 16 * two), (1, both, 1, 4 * two), (1, both, 1, two)]
    seeds = [(p1, p2, window, 0) for p1, p2 in search.starts() for window in _windows(search.redundancy)]
    bits, point = search.minimise(lambda points: evaluate(points)[0], seeds, steps)
    memory = float(evaluate(np.array([point]))[1][0]) + 1 + search.bits
    parameters = dict(zip(("p1", "p2", "l", "shift"), point, strict=True))
    return Cost(bits, memory, {**parameters, "mixed": int(mixed), "extended": int(extended)})


def _windows(redundancy: int) -> list[int]:
    """Values of l from which the descent may start."""
    return [
        window
        for window in (0, 8, 16, 24, 32, 40, 52, 68, 92, 124, 164, 220, 300, 420)
        if window < redundancy
    ]


def bjmm(instance: Instance, *, early_abort: bool = False) -> Cost:
    """May, Meurer and Thomae 2011; Becker, Joux, May and Meurer 2012: a tree of depth 2.

    Each half of the pattern is a sum of two vectors of p/2 + e errors (e = 0: MMT), whose sums are
    first merged on as many bits as there are representations, then on the rest of l.
    """
    return min((_bjmm(instance, mixed, early_abort) for mixed in _ways(instance)), key=_bits)


def _bjmm(instance: Instance, mixed: bool, early_abort: bool) -> Cost:
    search = _Search(instance, mixed=mixed, early_abort=early_abort)

    def evaluate(points: Ints) -> tuple[Floats, Floats]:
        p1, p2, e1, e2, window, shift = points.T
        p = p1 + p2
        K1, K2 = search.draw(search.k + window, p1, p2, shift)
        base, l1 = np.zeros(p1.shape), np.zeros(p1.shape)
        halves, extra = search.parts(p1, p2, K1, K2), search.parts(e1, e2, K1, K2)
        for (errors, K), (e, _) in zip(halves, extra, strict=True):
            base = base + search.binomial(K, errors + 2 * e)
            l1 = l1 + 2 * (search.binomial(2 * errors, errors) + search.binomial(K - 2 * errors, 2 * e))
        middle = np.maximum(2 * base - l1, 0.0)
        lists = np.logaddexp2(base + 2, np.logaddexp2(2 * base - l1, middle) + 1)
        success = search.success(p1, p2, K1, K2)
        bits = search.finish(lists, 2 * middle - (window - l1), 2 * p + 4 * (e1 + e2) - 1, success, p, window)
        return np.where((l1 >= 0) & (l1 <= window), bits, IMPOSSIBLE), np.logaddexp2(base + 1, middle)

    both, two = int(not mixed), int(search.two_parts)
    steps = [
        (2, 2 * both, 1, both, 16, 64 * two),
        (1, both, 1, both, 6, 16 * two),
        (1, both, 1, both, 2, 4 * two),
        (1, both, 1, both, 1, two),
    ]
    seeds = [
        (p1, p2, e, e * both, window, 0)
        for p1, p2 in search.starts()
        for e in (0, 1, 3)
        for window in _windows(search.redundancy)
    ]
    bits, point = search.minimise(lambda points: evaluate(points)[0], seeds, steps)
    memory = float(evaluate(np.array([point]))[1][0]) + search.bits
    parameters = dict(zip(("p1", "p2", "e1", "e2", "l", "shift"), point, strict=True))
    return Cost(bits, memory, {**parameters, "mixed": int(mixed)})
