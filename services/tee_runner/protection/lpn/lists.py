"""List-based information set decoding of a two-part instance: Stern, Dumer, MMT, BJMM.

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

**Search.** Every choice of p (and e) whose lists are not longer than Prange takes is tried, with
the windows l around the one that balances the lists against the candidates, on a grid of K_1; the best
are then followed in single steps of all parameters at once. Tests compare with full enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import log2
from typing import Any, NamedTuple

import numpy as np

from tee_runner.protection.lpn.decoding import (
    IMPOSSIBLE,
    Binomials,
    Cost,
    Floats,
    Instance,
    Ints,
    log2_elimination,
    prange,
)

_COORDINATES = ("p1", "p2", "e1", "e2", "l", "K1")
# The most errors per half that are tried. Best values are far below (24 at Classic McEliece 6688) where
# costs are of interest; lists of more are longer than 2^400.
LARGEST_P = 128
# Added errors of BJMM that the grid has; the descent moves on from there.
_ADDED = (0, 1, 2, 3, 5, 8)
# Windows of the grid, in bits beyond the balance of lists and candidates.
_BEYOND_BALANCE = (-6, -2, 1, 4, 8)
# K_1 of the grid, in fractions of the span between it and the end of its range.
_DRAWS = (-0.5, -0.25, -0.1, -0.03, 0.0, 0.03, 0.1, 0.25, 0.5)
# Choices of p and e that are tried on the full grid, and those that are followed from there.
_REFINED = 48
_FOLLOWED = 5


class _Lists(NamedTuple):
    """log2 of: steps on lists and candidates per iteration, longest list, representations."""

    lists: Floats
    candidates: Floats
    longest: Floats
    representations: Floats


class _Search:
    """One algorithm on one instance. A point is a row ``(p1, p2, e1, e2, l, K1)``.

    In a ``mixed`` search p1 and e1 count the errors of both parts, and p2 and e2 are 0.
    ``kind``: "stern" (windows within the redundancy), "dumer" (K = k + l) or "bjmm". Lists longer
    than 2^``cap`` are not tried.
    """

    def __init__(self, instance: Instance, kind: str, *, mixed: bool, early_abort: bool, cap: float) -> None:
        self.lengths, self.weights, self.k = instance.lengths, instance.weights, instance.dimension
        self.n, self.weight = instance.length, instance.weight
        self.redundancy = self.n - self.k
        self.supports = instance.log2_supports
        self.elimination = log2_elimination(self.n, self.k)
        self.two_parts = instance.lengths[1] > 0
        self.binomial = Binomials(self.n)
        self.kind, self.mixed, self.early_abort = kind, mixed, early_abort
        self.bits = log2(self.n)
        self.cap = cap

    def drawn(self, window: Any) -> Any:
        """K."""
        return self.k if self.kind == "stern" else self.k + window

    def parts(self, first: Ints, second: Ints, K1: Ints, K2: Ints) -> list[tuple[Ints, Ints]]:
        """Which choices a list is made of: counts of errors in sets of positions."""
        return [(first, K1 + K2)] if self.mixed else [(first, K1), (second, K2)]

    def lists(self, points: Ints) -> _Lists:
        p1, p2, e1, e2, window, K1 = points.T
        K2 = self.drawn(window) - K1
        size, representations = np.zeros(p1.shape), np.zeros(p1.shape)
        if self.kind == "bjmm":
            halves, added = self.parts(p1, p2, K1, K2), self.parts(e1, e2, K1, K2)
            for (errors, K), (e, _) in zip(halves, added, strict=True):
                size = size + self.binomial(K, errors + 2 * e)
                ways = self.binomial(2 * errors, errors) + self.binomial(K - 2 * errors, 2 * e)
                representations = representations + 2 * ways
            merged = 2 * size - representations
            longest = np.maximum(merged, 0.0)
            lists = np.logaddexp2(size + 2, np.logaddexp2(merged, longest) + 1)
            candidates = 2 * longest - (window - representations)
            return _Lists(lists, candidates, np.logaddexp2(size + 1, longest), representations)
        for errors, K in self.parts(p1, p2, K1, K2):
            size = size + self.binomial(K, 2 * errors)
        windows = np.zeros(p1.shape)
        if self.kind == "stern":
            outside, r = 2 * (self.weight - 2 * (p1 + p2)), self.redundancy
            windows = self.binomial(2 * r, outside) - self.binomial(2 * (r - window), outside)
        return _Lists(windows + size + 1, windows + 2 * size - window, size + 1, representations)

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

    def cost(self, points: Ints) -> Floats:
        """log2 of bit operations of all iterations; IMPOSSIBLE for a point that is no choice."""
        p1, p2, _, _, window, K1 = points.T
        (n1, n2), p = self.lengths, p1 + p2
        K2 = self.drawn(window) - K1
        lists, candidates, _, representations = self.lists(points)
        if self.early_abort:
            columns = 2 * p + 4 * (points[:, 2] + points[:, 3]) - 1
            abort = np.log2(2.0 * np.maximum(self.weight - 2 * p + 1, 1) * np.maximum(columns, 1))
            labels = lists + np.log2(np.maximum(window, 1))
            work = np.logaddexp2(labels, candidates + np.minimum(abort, self.bits))
        else:
            work = np.logaddexp2(lists, candidates) + self.bits
        total = np.logaddexp2(self.elimination + self.bits, work) - self.success(p1, p2, K1, K2)
        valid = (total < IMPOSSIBLE) & (window >= 0) & (window < self.redundancy) & (p <= LARGEST_P)
        valid &= (points >= 0).all(axis=1) & (K2 >= 0) & (np.maximum(K1 - n1, K2 - n2) <= 0)
        valid &= (representations >= 0) & (representations <= window) if self.kind == "bjmm" else True
        bits: Floats = np.where(valid, total, IMPOSSIBLE)
        return bits

    def draw(self, K: Any, p1: Ints, p2: Ints, fraction: Any) -> Ints:
        """K_1 where both parts have the same rate of errors outside the draw, moved by ``fraction``."""
        (n1, n2), (w1, w2) = self.lengths, self.weights
        if not self.two_parts:
            return np.full(p1.shape, K, dtype=np.int64)
        rest1, rest2 = np.full(p1.shape, float(w1)), np.full(p1.shape, float(w2))
        if not self.mixed:
            rest1, rest2 = np.maximum(w1 - 2 * p1, 0.5), np.maximum(w2 - 2 * p2, 0.5)
        low, high = np.maximum(0, K - n2), np.minimum(n1, K)
        even = np.clip(n1 - (self.n - K) * rest1 / (rest1 + rest2), low, high)
        moved = even + fraction * np.where(fraction < 0, even - low, high - even)
        drawn: Ints = np.rint(moved).astype(np.int64)
        return drawn

    def counts(self) -> Ints:
        """The (p1, p2, e1, e2) worth the full grid, ``(m, 4)``: the best at its coarsest."""
        if self.mixed or not self.two_parts:
            first, second = range(min(self.weight // 2, LARGEST_P) + 1), range(1)
        else:
            first, second = (range(min(w // 2, LARGEST_P) + 1) for w in self.weights)
        counts = np.array([(*pair, 0, 0) for pair in product(first, second)], dtype=np.int64)
        if self.kind != "bjmm":
            return self.best_counts(counts, _REFINED)
        more = np.array([0, 0, 2, 2 if len(second) > 1 else 0])
        pairs = np.vstack([counts, counts + more])
        pairs = _distinct(self.best_counts(pairs, 8 * _REFINED) * (1, 1, 0, 0), 4 * _REFINED)
        added = np.array([(0, 0, *e) for e in product(_ADDED, _ADDED if len(second) > 1 else (0,))])
        return self.best_counts((pairs[:, None] + added).reshape(-1, 4), _REFINED)

    def best_counts(self, counts: Ints, most: int) -> Ints:
        """The best at a coarse grid, of those whose lists are neither empty nor too long there."""
        size = np.zeros(len(counts), np.int64)
        kept = np.zeros(len(counts), np.bool_)
        for window, fraction in product((0, self.redundancy // 4, self.redundancy // 2), _DRAWS[1::3]):
            longest = self.lists(self.points(counts, size + window, fraction)).longest
            kept |= (longest > -1) & (longest <= self.cap + 2)
        if not kept.any():
            return counts[:0]
        points = self.grid(counts[kept], (1,), _DRAWS[1::3])
        values = self.cost(points)
        order = np.argsort(values, kind="stable")
        return _distinct(points[order[values[order] < IMPOSSIBLE], :4], most)

    def grid(self, counts: Ints, beyond: Sequence[int], fractions: Sequence[float]) -> Ints:
        """Points with windows ``beyond`` balance and K_1 moved by ``fractions``, for each of ``counts``."""
        more, fraction = (x.ravel() for x in np.meshgrid(beyond, fractions if self.two_parts else (0.0,)))
        repeated = np.repeat(counts, len(more), axis=0)
        more, fraction = np.tile(more, len(counts)), np.tile(fraction, len(counts))
        window = np.zeros(len(repeated), np.int64)
        for _ in range(2):
            lists = self.lists(self.points(repeated, window, fraction))
            balance = np.maximum(lists.lists, self.elimination)
            wanted = np.maximum(window + lists.candidates - balance + more, lists.representations)
            window = np.rint(np.clip(wanted, 0, self.redundancy - 1)).astype(np.int64)
        return self.points(repeated, window, fraction)

    def points(self, counts: Ints, window: Ints, fraction: Any) -> Ints:
        K1 = self.draw(self.drawn(window), counts[:, 0], counts[:, 1], fraction)
        return np.column_stack([counts, window, K1])

    def follow(self, parameters: dict[str, int]) -> Cost:
        """The cost that a descent from the point of another instance finds: an upper bound."""
        point = np.array([parameters[name] for name in _COORDINATES], dtype=np.int64)
        if not self.two_parts:
            point[5] = self.drawn(point[4])
        low, high = max(0, self.drawn(int(point[4])) - self.lengths[1]), self.lengths[0]
        point[5] = min(max(point[5], low), high)
        return self.found(*self.descend(float(self.cost(point[None])[0]), point))

    def found(self, bits: float, point: Ints) -> Cost:
        longest = float(self.lists(point[None]).longest[0])
        parameters = {name: int(x) for name, x in zip(_COORDINATES, point, strict=True)}
        return Cost(bits, longest + self.bits, {**parameters, "mixed": int(self.mixed)})

    def minimise(self) -> Cost:
        """The least cost found and its point."""
        counts = self.counts()
        if not len(counts):
            return Cost(IMPOSSIBLE, 0.0)
        grid = self.grid(counts, _BEYOND_BALANCE, _DRAWS)
        values = self.cost(grid)
        order = np.argsort(values, kind="stable")
        best, point = IMPOSSIBLE, grid[order[0]]
        for counts in _distinct(grid[order, :4], _FOLLOWED):
            start = order[np.argmax((grid[order, :4] == counts).all(axis=1))]
            value, here = self.descend(float(values[start]), grid[start])
            if value < best:
                best, point = value, here
        return self.found(best, point)

    def descend(self, value: float, point: Ints) -> tuple[float, Ints]:
        """Follows the best neighbour until none is better: with these errors first, then with any."""
        split = self.two_parts and not self.mixed
        for errors, span in ((False, 64), (False, 16), (False, 4), (False, 1), (True, 1)):
            moves = (errors, errors and split, errors and self.kind == "bjmm")
            offsets = _offsets(*moves, self.two_parts, self.kind != "stern", span)
            while True:
                around = point + offsets
                found = self.cost(around)
                least = int(np.argmin(found))
                if found[least] >= value:
                    break
                value, point = float(found[least]), around[least]
        return value, point


def _distinct(rows: Ints, most: int) -> Ints:
    """The first ``most`` distinct rows, in order."""
    _, first = np.unique(rows, axis=0, return_index=True)
    kept: Ints = rows[np.sort(first)[:most]]
    return kept


@lru_cache(maxsize=64)
def _offsets(first: bool, second: bool, added: bool, two_parts: bool, extended: bool, span: int) -> Ints:
    """Neighbours of a point: one error more or less of the given kinds, windows and K_1 to match.

    In a one-part instance K_1 is K, which moves with the window if that is ``extended``.
    """
    errors = [(-1, 0, 1) if kind else (0,) for kind in (first, second, added, added and second)]
    windows = (0, -1, 1, -2, 2, -4, 4, -7, 7) if span == 1 else (0, -span, span)
    draws = (0, -span, span) if two_parts else (0,)
    offsets = np.array(list(product(*errors, windows, draws)), dtype=np.int64)
    if not two_parts and extended:
        offsets[:, 5] = offsets[:, 4]
    return offsets


def stern(instance: Instance, *, early_abort: bool = False) -> Cost:
    """Stern 1989 and Dumer 1991: the better of the two.

    Stern: p errors in each half of an information set, none in a window of l further positions;
    several windows per elimination (Bernstein, Lange and Peters 2008). Dumer: p errors in each half
    of k + l positions.
    """
    return _best(instance, ("stern", "dumer"), early_abort)


def bjmm(instance: Instance, *, early_abort: bool = False) -> Cost:
    """May, Meurer and Thomae 2011; Becker, Joux, May and Meurer 2012: a tree of depth 2.

    Each half of the pattern is a sum of two vectors of p/2 + e errors (e = 0: MMT), whose sums are
    first merged on as many bits as there are representations, then on the rest of l.
    """
    return _best(instance, ("bjmm",), early_abort)


def follow(instance: Instance, known: Cost) -> Cost:
    """An upper bound on early-abort BJMM's cost from its parameters on a similar instance, quickly."""
    mixed = bool(known.parameters["mixed"])
    search = _Search(instance, "bjmm", mixed=mixed, early_abort=True, cap=IMPOSSIBLE)
    return search.follow(known.parameters)


def _best(instance: Instance, kinds: tuple[str, ...], early_abort: bool) -> Cost:
    two = all(instance.lengths) and all(instance.weights)
    best = prange(instance)
    least = Cost(IMPOSSIBLE, 0.0)
    for kind, mixed in product(kinds, (True, False) if two else (True,)):
        cap = min(least.bits, best.bits, instance.log2_supports)
        cap -= 3 if early_abort else log2(instance.length)
        found = _Search(instance, kind, mixed=mixed, early_abort=early_abort, cap=cap).minimise()
        least = min(least, found, key=lambda cost: cost.bits)
    return least
