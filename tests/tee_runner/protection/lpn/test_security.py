"""The LPN security estimator against published figures, a real decoding, and itself."""

from __future__ import annotations

from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.protection.lpn.decoding import IMPOSSIBLE, Instance, log2_binomial, prange
from tee_runner.protection.lpn.field import dense_secret
from tee_runner.protection.lpn.lists import bjmm, stern
from tee_runner.protection.lpn.security import TARGETS, estimate, instance, security_bits
from tee_runner.protection.lpn.statistical import collection, log2_biases, statistical_decoding

# (n, k, w), then log2 of bit operations with free memory access: Prange, the better of Stern and
# Dumer, the better of BJMM depths 2 and 3. From CryptographicEstimators 2.1.1 (the maintained
# estimator of Esser and Bellini, PKC 2022), without quasi-cyclic gains. The first row is also in its
# documentation.
PUBLISHED = {
    "Classic McEliece 348864": ((3488, 2720, 64), 173.388, 151.380, 141.886),
    "Classic McEliece 460896": ((4608, 3360, 96), 216.835, 193.213, 180.834),
    "Classic McEliece 6688128": ((6688, 5024, 128), 295.718, 267.870, 246.018),
    "BIKE-1, message": ((24646, 12323, 134), 174.065, 152.923, 153.370),
    "HQC-1": ((35338, 17669, 132), 173.388, 152.389, 152.711),
    "length 5120": ((5120, 2560, 140), 175.911, 154.953, 151.667),
    "length 1728": ((1728, 1152, 84), 167.611, 147.016, 137.699),
    "dense secret": ((4096, 530, 540), 149.226, 128.383, 126.143),
}

# (n, k, w) and the figure of a quick Stern estimate.
QUICK_STERN = {
    "length 5120": ((5120, 2560, 140), 147),
    "length 1728": ((1728, 1152, 84), 142),
    "Classic McEliece 348864": ((3488, 2720, 64), 145),
    "BIKE-1": ((24646, 12323, 134), 144),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    """Same cost model: Prange to rounding, Stern within 0.5 (their p is even for Stern, ours any).

    BJMM: ours is depth 2 with representations not rounded up, theirs the better of depths 2 and 3;
    depth 3 takes up to 2.5 bits more off the largest instance. For sparse errors ours is below as
    odd p is halved.
    """
    (n, k, w), published_prange, published_stern, published_bjmm = PUBLISHED[name]
    instance = Instance.uniform(n, k, w)
    assert prange(instance).bits == pytest.approx(published_prange, abs=0.05)
    assert stern(instance).bits == pytest.approx(published_stern, abs=0.5)
    assert -1.2 < bjmm(instance).bits - published_bjmm < 2.5


@pytest.mark.parametrize("name", QUICK_STERN)
def test_quick_stern_figures(name: str) -> None:
    """Early abort counts the bits that are computed, as those figures do; free parameters differ."""
    (n, k, w), quick = QUICK_STERN[name]
    assert stern(Instance.uniform(n, k, w), early_abort=True).bits == pytest.approx(quick, abs=2.0)


@pytest.mark.parametrize(
    ("samples", "dimension", "weight"), [(2560, 406, 382), (4096, 499, 512), (8192, 725, 723)]
)
def test_dense_secret_over_a_field(samples: int, dimension: int, weight: int) -> None:
    """128 bits by the published formulas, and Gauss is the weakest."""
    costs = dense_secret(samples, dimension, weight, 2**31 - 1)
    assert min(costs, key=lambda name: costs[name]) == "gauss"
    assert costs["gauss"] == pytest.approx(128, abs=0.2)


@pytest.mark.parametrize(("samples", "dimension", "weight"), [(4096, 530, 540), (8192, 770, 770)])
def test_dense_secret_over_the_ring(samples: int, dimension: int, weight: int) -> None:
    """128 bits, reached by binary ISD: 1.4 above as the published best is BJMM and here is Stern-Dumer.

    The reduction mod 2 pays: over a field of that size the same weights cost far more.
    """
    costs = dense_secret(samples, dimension, weight, 2**32)
    assert min(costs, key=lambda name: costs[name]) == "isd"
    assert 128 <= costs["isd"] < 129.5
    assert min(dense_secret(samples, dimension, weight, 2**31 - 1).values()) > costs["isd"] + 10
    instance = Instance.uniform(samples, dimension, weight)
    assert bjmm(instance).bits == pytest.approx(128, abs=2.5)


def test_statistical_decoding_wins_at_low_rates_only() -> None:
    """At the Gilbert-Varshamov weight SD 2.0 beats ISD for rates below about 0.3, not above."""
    n = 3000
    for rate, wins in ((0.1, True), (0.2, True), (0.4, False), (0.5, False), (0.7, False)):
        k = round(n * rate)
        weight = next(w for w in range(n) if log2_binomial(n, w) > n - k)
        instance = Instance.uniform(n, k, weight)
        assert (statistical_decoding(instance).bits < bjmm(instance).bits) == wins


@given(st.integers(8, 120), st.data())
def test_biases_are_the_exact_ones_where_those_are_larger(length: int, data: st.DataObject) -> None:
    """The Krawtchouk polynomial by its definition: a sum over the errors among the t positions."""
    weight, most = data.draw(st.integers(0, length)), min(40, length)
    rate = abs(1 - 2 * weight / length)
    for t, found in enumerate(log2_biases(length, weight, most)):
        ways = sum((-1) ** j * comb(weight, j) * comb(length - weight, t - j) for j in range(t + 1))
        assert 2.0**found == pytest.approx(max(rate**t, abs(ways) / comb(length, t)), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("d", "k"), [(576, 192), (576, 256), (96, 64), (320, 512)])
def test_dual_words_see_errors_on_half_of_the_positions(d: int, k: int) -> None:
    """Independent errors of rate ½ have no bias; a fixed weight has, and its estimate no cliff there."""
    half = security_bits(d, k, k // 2, d // 2)
    assert half == pytest.approx(security_bits(d, k, k // 2 - 1, d // 2 - 1), abs=3.0)
    assert statistical_decoding(instance(d, k, k // 2, d // 2)).bits < IMPOSSIBLE
    assert security_bits(576, 192, 96, 288) < 100


@pytest.mark.parametrize(("w_f", "w_e"), [(10, 30), (64, 90), (3, 150)])
def test_more_than_half_is_as_hard_as_the_complement(w_f: int, w_e: int) -> None:
    bits = security_bits(192, 128, w_f, w_e)
    assert security_bits(192, 128, 128 - w_f, w_e) == security_bits(192, 128, w_f, 192 - w_e) == bits


def test_equal_rates_are_the_uniform_case() -> None:
    two = Instance(dimension=2560, lengths=(2560, 2560), weights=(70, 70))
    one = Instance.uniform(5120, 2560, 140)
    for attack in (prange, stern, bjmm):
        assert attack(two).bits == pytest.approx(attack(one).bits, abs=0.1)


def test_a_known_uneven_split_helps_the_attacker() -> None:
    for weights in ((50, 90), (100, 40)):
        two = Instance(dimension=2560, lengths=(2560, 2560), weights=weights)
        one = Instance.uniform(5120, 2560, 140)
        for attack in (prange, stern, bjmm):
            assert attack(two).bits < attack(one).bits - 1


@settings(max_examples=5, deadline=None)
@given(
    width=st.integers(1024, 8192),
    k=st.integers(512, 4096),
    w_f=st.integers(30, 120),
    w_e=st.integers(30, 120),
)
def test_monotone(width: int, k: int, w_f: int, w_e: int) -> None:
    """More errors, or a larger code at the same weights, never cost the attacker less.

    More errors in one part may leave the cost as it is: where d > k and f is heavy, the attacker
    takes all positions from e and f is as good as dense. More in both parts cost more.
    """

    def bits(k: int, w_f: int, w_e: int) -> list[float]:
        instance = Instance(dimension=k, lengths=(k, width), weights=(w_f, w_e))
        return [prange(instance).bits, stern(instance, early_abort=True).bits, bjmm(instance).bits]

    here = bits(k, w_f, w_e)
    for k_more, f_more, e_more in ((0, 8, 0), (0, 0, 8), (256, 0, 0), (0, 8, 8)):
        least = 0.0 if f_more and e_more else -1e-6
        for less, more in zip(here, bits(k + k_more, w_f + f_more, w_e + e_more), strict=True):
            assert more - less > least


def test_estimate_of_a_tiny_instance_is_an_actual_decoding() -> None:
    """Prange on toy instances with an uneven split takes the predicted number of iterations."""
    rng = np.random.default_rng(5)
    k, d, w_f, w_e = 22, 40, 2, 5
    instance = Instance(dimension=k, lengths=(k, d), weights=(w_f, w_e))
    from_f = prange(instance).parameters["K1"]
    success = log2_binomial(k - from_f, w_f) + log2_binomial(d - (k - from_f), w_e) - instance.log2_supports
    tries = []
    for _ in range(40):
        G = rng.integers(0, 2, (k, d), dtype=np.uint8)
        error = np.zeros(k + d, np.uint8)
        error[rng.choice(k, w_f, replace=False)] = 1
        error[k + rng.choice(d, w_e, replace=False)] = 1
        # y = e + f·G: the syndrome of (f, e) under H = [Gᵀ | I].
        H = np.hstack([G.T, np.eye(d, dtype=np.uint8)])
        syndrome = H @ error % 2
        count = 0
        while True:
            inside_f = rng.choice(k, from_f, replace=False)
            inside_e = k + rng.choice(d, k - from_f, replace=False)
            outside = np.setdiff1d(np.arange(k + d), np.concatenate([inside_f, inside_e]))
            found = _solve(H[:, outside], syndrome)
            if found is None:
                continue
            count += 1
            if found.sum() == w_f + w_e and found[outside < k].sum() == w_f:
                assert np.array_equal(np.flatnonzero(error), outside[found == 1])
                break
        tries.append(count)
    # Tries are geometric: the standard error of the mean of 40 is 1/√40 of it; three of those.
    assert np.mean(tries) * 2**success == pytest.approx(1, abs=3 / np.sqrt(40))


def _solve(A: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """The x with A·x = b mod 2; None if A is singular."""
    M = np.column_stack([A, b]).astype(np.uint8)
    n = len(b)
    for column in range(n):
        pivots = np.flatnonzero(M[column:, column])
        if not len(pivots):
            return None
        pivot = column + pivots[0]
        M[[column, pivot]] = M[[pivot, column]]
        others = np.flatnonzero(M[:, column])
        M[others[others != column]] ^= M[column]
    return M[:, -1]


def test_levels_take_off_what_many_targets_gain() -> None:
    one = estimate(2560, 1536, 77, 141, targets=1)
    many = estimate(2560, 1536, 77, 141)
    assert one.weakest == many.weakest == "bjmm, early abort"
    assert one.bits - many.bits == pytest.approx(20)
    assert many.bits == security_bits(2560, 1536, 77, 141)
    assert security_bits(2560, 1536, 77, 141, targets=2.0**20) == pytest.approx(one.bits - 10)


def test_rows_share_the_search_for_dual_words() -> None:
    """A collection is never harder than one row without the transform, and is far from the weakest."""
    instance = Instance(dimension=1536, lengths=(1536, 2560), weights=(77, 141))
    costs = [collection(instance, 2.0**log2_rows).bits for log2_rows in (0, 10, 20, 40)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] - 5
    full = estimate(2560, 1536, 77, 141)
    assert full.costs["dual words, all rows"].bits == costs[-1] > full.bits + 40


def test_a_transform_pays_where_errors_are_dense() -> None:
    """A small dense secret is the transform's business, sparse errors in a long code are not."""
    dense = Instance(dimension=256, lengths=(256, 576), weights=(64, 166))
    assert statistical_decoding(dense).bits < bjmm(dense).bits - 20
    sparse = Instance(dimension=1536, lengths=(1536, 2560), weights=(77, 141))
    assert statistical_decoding(sparse).bits > bjmm(sparse).bits + 20


def test_a_dense_secret_is_no_harder_than_half_as_many_odd_values() -> None:
    d, k, w_e = 4096, 512, 600
    dense, sparse = estimate(d, k, None, w_e), estimate(d, k, k // 2, w_e)
    assert sparse.bits == pytest.approx(dense.bits, abs=2)


def test_counting_binds_where_decoding_is_not_unique() -> None:
    full = estimate(64, 512, 193, 27)
    assert full.weakest == "counting"
    assert full.log2_solutions_mod_2 > 0 > estimate(2560, 2560, 64, 88).log2_solutions_mod_2
    supports = log2_binomial(64, 27) + log2_binomial(512, 193)
    assert full.bits == pytest.approx(0.283 * supports - log2(TARGETS) / 2)


def test_table_lists_every_attack_cheapest_first() -> None:
    full = estimate(2560, 2560, 64, 88)
    bits = [row[1] for row in full.table()]
    assert bits == sorted(bits)
    assert full.table()[0][0] == full.weakest
    assert len(bits) == 8


def test_instances_are_validated() -> None:
    with pytest.raises(ValueError, match="dimension"):
        estimate(64, 64, None, 8)
    with pytest.raises(ValueError, match="weights"):
        estimate(64, 64, 65, 8)
