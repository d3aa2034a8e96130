"""The searches over attack parameters find what enumerating all of them finds."""

from __future__ import annotations

from itertools import product
from math import comb, inf, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.protection.lpn.decoding import Instance, log2_binomial, log2_elimination, prange
from tee_runner.protection.lpn.lists import bjmm, stern


def plain_stern(instance: Instance, most: int, windows: int) -> float:
    """Every (p, l) of Stern and Dumer on a one-part instance, from the textbook formulas."""
    k, rows, w = instance.dimension, instance.length - instance.dimension, instance.weight
    n, elimination = instance.length, 2 ** log2_elimination(instance.length, k)

    def cost(p: int, window: int, extended: bool) -> float:
        inside = k + window * extended
        size = (log2_binomial(inside // 2, p) + log2_binomial((inside + 1) // 2, p)) / 2
        lists = 2 ** (size + 1) + 2 ** (2 * size - window)
        rest = log2_binomial(rows - window, w - 2 * p)
        if not extended:
            whole = log2_binomial(rows, w - 2 * p)
            lists, rest = lists * 2 ** (whole - rest), whole
        success = min(0.0, rest + 2 * size - log2_binomial(n, w))
        return log2(elimination + lists) - success + log2(n)

    return min(
        cost(p, window, extended)
        for p in range(min(w // 2, most) + 1)
        for window in range(min(windows, rows))
        for extended in (False, True)
        if rows - window >= w - 2 * p
    )


@settings(max_examples=40, deadline=None)
@given(k=st.integers(100, 900), rows=st.integers(150, 600), w=st.integers(10, 60))
def test_the_best_stern_of_one_part(k: int, rows: int, w: int) -> None:
    """The two differ by rounding: an odd number of positions is halved by the gamma function."""
    instance = Instance.uniform(k + rows, k, w)
    found = stern(instance)
    least = plain_stern(instance, most=12, windows=90)
    assert found.bits < least + 0.01
    if found.parameters["p1"] <= 12 and found.parameters["l"] < 90:
        assert found.bits > least - 0.01


def split_stern(instance: Instance, most: int, windows: int) -> float:
    """Every (p1, p2, l, K1) of Dumer with split lists on a two-part instance, with exact binomials."""
    (n1, n2), (w1, w2), k = instance.lengths, instance.weights, instance.dimension
    elimination = 2 ** log2_elimination(instance.length, k)
    best = inf
    for window, p1, p2 in product(
        range(0, windows, 2), range(min(w1 // 2, most) + 1), range(min(w2 // 2, most) + 1)
    ):
        K = k + window
        for K1 in range(max(0, K - n2), min(n1, K) + 1):
            if K1 % 2 or (K - K1) % 2:
                continue
            K2 = K - K1
            size = comb(K1 // 2, p1) * comb(K2 // 2, p2)
            ways = size**2 * comb(n1 - K1, w1 - 2 * p1) * comb(n2 - K2, w2 - 2 * p2)
            if ways:
                steps = elimination + 2 * size + size**2 / 2**window
                best = min(best, log2(steps) - log2(ways))
    return best + log2(comb(n1, w1) * comb(n2, w2)) + log2(instance.length)


@pytest.mark.parametrize(
    ("k", "d", "weights"), [(40, 60, (4, 14)), (60, 50, (9, 6)), (36, 90, (6, 25)), (80, 70, (12, 12))]
)
def test_the_best_stern_of_two_parts(k: int, d: int, weights: tuple[int, int]) -> None:
    instance = Instance(dimension=k, lengths=(k, d), weights=weights)
    # Mixed lists, odd sizes and windows can only do better.
    found, least = stern(instance), split_stern(instance, most=4, windows=24)
    assert least - 3 < found.bits <= least + 1e-9


def every_bjmm(instance: Instance, *, early_abort: bool, errors: int, added: int, windows: int) -> float:
    """Mixed BJMM over a full grid of (p, e, l, K1), from the formulas of the module's sources."""
    (n1, n2), (w1, w2) = instance.lengths, instance.weights
    n, w = instance.length, w1 + w2
    logs = np.concatenate([[0.0], np.cumsum(np.log2(np.arange(1, 4 * n)))])

    def choose(top: np.ndarray, k: np.ndarray) -> np.ndarray:
        value = logs[np.clip(top, 0, None)] - logs[np.clip(k, 0, None)] - logs[np.clip(top - k, 0, None)]
        return np.where((k < 0) | (k > top), -1e7, value)

    best = inf
    elimination = log2_elimination(n, instance.dimension) + log2(n)
    window, K1 = (x.ravel() for x in np.meshgrid(np.arange(windows), np.arange(n1 + 1)))
    # Even numbers of positions only: no halves to round.
    K = instance.dimension + window
    even = (K1 <= K) & (K1 + n2 >= K) & (K % 2 == 0)
    window, K1, K = window[even], K1[even], K[even]
    K2 = K - K1
    for p, e in product(range(0, errors + 1, 2), range(added + 1)):
        base = choose(K // 2, np.full_like(K, p // 2 + e))
        ways = log2(comb(p, p // 2)) + choose(K // 2 - p, np.full_like(K, e))
        bits = 2 * ways
        middle = np.maximum(2 * base - bits, 0.0)
        lists = np.logaddexp2(base + 2, np.logaddexp2(2 * base - bits, middle) + 1)
        candidates = 2 * middle - (window - bits)
        inside = np.arange(min(w1, 2 * p) + 1)[:, None]
        pattern = choose(K1, inside) + choose(K2, 2 * p - inside)
        pattern = pattern + choose(n1 - K1, w1 - inside) + choose(n2 - K2, w2 - 2 * p + inside)
        success = np.logaddexp2.reduce(pattern, axis=0) - instance.log2_supports
        success += 2 * choose(K // 2, np.full_like(K, p)) - choose(K, np.full_like(K, 2 * p))
        if early_abort:
            columns = max(2 * p + 4 * e - 1, 1)
            abort = min(log2(2 * max(w - 2 * p + 1, 1) * columns), log2(n))
            steps = np.logaddexp2(lists + np.log2(np.maximum(window, 1)), candidates + abort)
        else:
            steps = np.logaddexp2(lists, candidates) + log2(n)
        total = np.logaddexp2(elimination, steps) - np.minimum(success, 0.0)
        total = total[(bits >= 0) & (bits <= window) & (success > -1e5)]
        best = min(best, float(total.min(initial=inf)))
    return best


@settings(max_examples=12, deadline=None)
@given(
    k=st.integers(60, 160),
    d=st.integers(80, 240),
    w_f=st.integers(4, 24),
    w_e=st.integers(6, 30),
    early_abort=st.booleans(),
)
def test_bjmm_is_never_above_the_enumeration(k: int, d: int, w_f: int, w_e: int, early_abort: bool) -> None:
    """Where the enumeration covers what was found, they are equal."""
    instance = Instance(dimension=k, lengths=(k, d), weights=(w_f, w_e))
    found = bjmm(instance, early_abort=early_abort)
    least = every_bjmm(instance, early_abort=early_abort, errors=12, added=2, windows=90)
    assert found.bits <= least + 1e-6
    at = found.parameters
    covered = at["mixed"] and at["p1"] % 2 == 0 and (k + at["l"]) % 2 == 0
    if covered and at["p1"] <= 12 and at["e1"] <= 2 and at["l"] < 90:
        assert found.bits == pytest.approx(least, abs=1e-6)


def test_lists_pay_for_themselves() -> None:
    """Lists may stay empty, so that neither algorithm costs much more than Prange."""
    for k, d, weights in ((1536, 2560, (77, 141)), (300, 200, (20, 30)), (64, 512, (30, 60))):
        instance = Instance(dimension=k, lengths=(k, d), weights=weights)
        for attack in (stern, bjmm):
            assert attack(instance).bits < prange(instance).bits + 0.5
            assert attack(instance, early_abort=True).bits <= attack(instance).bits
