"""The integrity check: what passes, what is caught, and that check and use see the same bytes."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tee_runner.errors import GeloError, IntegrityError, WorkerError
from tee_runner.protection.base import Linear, Protection
from tee_runner.protection.integrity import MAX_PROBES, Integrity, deviations, spectral_norm
from tee_runner.protection.schemes import SCHEMES

from .doubles import HALF_SCHEMES, ExactTransport, Float32, Float64, key_of, protect

Rows = Literal["normal", "coherent", "positive", "few large", "sorted", "tiny", "huge"]
Order = Literal["sequential", "reversed", "shuffled", "pairwise", "chunked"]
NAME = "layers.3.gate_up"


def weight_of(seed: int, d_out: int, d_in: int, mean: float = 0.0) -> NDArray[np.float16]:
    return (0.05 * (np.random.default_rng(seed).standard_normal((d_out, d_in)) + mean)).astype(np.float16)


def operand_of(seed: int, s: int, weight: NDArray[np.float16], kind: Rows) -> NDArray[np.float16]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((s, weight.shape[1]))
    if kind == "coherent":
        direction = np.linalg.svd(weight.astype(np.float64))[2][0]
        rows = 100.0 * direction + 0.01 * rows
    elif kind == "positive":
        rows = np.abs(rows)
    elif kind == "few large":
        rows *= 0.01
        rows[:, rng.integers(rows.shape[1], size=3)] = 1000.0
    elif kind == "sorted":
        rows = np.sort(rows, axis=1)
    elif kind == "tiny":
        rows *= 2.0**-22  # float16 subnormals and zeros
    elif kind == "huge":
        rows *= 2000.0
    return rows.astype(np.float16)


def product(weight: NDArray[np.float16], operand: NDArray[np.float16], order: Order) -> Float32:
    """Exact products, float32 sums."""
    terms = operand.astype(np.float32)[:, None, :] * weight.astype(np.float32)[None]
    if order == "pairwise":
        return terms.sum(axis=2, dtype=np.float32)
    if order == "reversed":
        terms = terms[..., ::-1]
    elif order == "shuffled":
        terms = terms[..., np.random.default_rng(1).permutation(terms.shape[2])]
    elif order == "chunked":
        pad = -terms.shape[2] % 16
        terms = np.pad(terms, ((0, 0), (0, 0), (0, pad))).reshape(*terms.shape[:2], 16, -1)
        terms = np.cumsum(terms, axis=3, dtype=np.float32)[..., -1]
    return np.cumsum(terms, axis=2, dtype=np.float32)[..., -1]


def exact(weight: NDArray[np.float16], operand: NDArray[np.float16]) -> Float32:
    return (operand.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)


def begin(integrity: Integrity, operand: NDArray[np.float16]) -> None:
    integrity.operand(*operand.shape)[...] = operand.view(np.uint16)
    integrity.begin(0, len(operand))


def made(weight: NDArray[np.float16], *, probes: int = 2, key: int = 1) -> Integrity:
    integrity = Integrity(probes, key_of(key))
    integrity.add(0, lambda: weight)
    return integrity


def secret(integrity: Integrity) -> Float64:
    return integrity._projections[0].v[: integrity.probes].astype(np.float64)


def tolerance(integrity: Integrity, operand: NDArray[np.float16]) -> Float64:
    """τ per row in float64, from its definition."""
    rows = len(operand)
    d_out = integrity._projections[0].v.shape[1]
    gain = integrity._projections[0].gain
    norms = np.linalg.norm(operand.astype(np.float64), axis=1)
    return gain * norms * deviations(rows, integrity.probes, d_out)


def caught(integrity: Integrity, operand: NDArray[np.float16], result: Float32) -> bool:
    begin(integrity, operand)
    try:
        integrity.verified(NAME, result)
    except IntegrityError:
        return True
    return False


shapes = st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 600))


# --- what is kept


@settings(max_examples=60, deadline=None)
@given(d_out=st.integers(1, 300), d_in=st.integers(1, 300), probes=st.integers(1, 5))
def test_the_projection_is_the_weights(d_out: int, d_in: int, probes: int) -> None:
    weight = weight_of(d_out, d_out, d_in)
    integrity = made(weight, probes=probes)
    projection = integrity._projections[0]
    expected = projection.v.astype(np.float64) @ weight.astype(np.float64)
    # float64 sums, rounded to float32 once.
    np.testing.assert_allclose(projection.z, expected, rtol=2.0**-24, atol=1e-12 * d_out)
    assert not projection.v[probes:].any()


def test_the_secret_is_standard_normal_and_drawn_anew() -> None:
    weight = weight_of(0, 20_000, 3)
    first, second = made(weight, probes=2), Integrity(2)
    second.add(0, lambda: weight)
    for v in (*secret(first), *secret(second)):
        assert abs(v.mean()) < 6 / np.sqrt(len(v))
        assert abs(v.var() - 1) < 6 * np.sqrt(2 / len(v))
    assert len(np.unique(np.concatenate([secret(first)[0], secret(first)[1], secret(second)[0]]))) > 59_000
    integrity = Integrity(1, key_of(1))
    integrity.add(0, lambda: weight)
    integrity.add(1, lambda: weight)
    assert not np.array_equal(integrity._projections[0].v[0], integrity._projections[1].v[0])


@settings(max_examples=60, deadline=None)
@given(d_out=st.integers(1, 200), d_in=st.integers(1, 200), mean=st.sampled_from([0.0, 0.3, 5.0]))
def test_the_spectral_norm_is_an_upper_estimate(d_out: int, d_in: int, mean: float) -> None:
    weight = weight_of(d_in, d_out, d_in, mean)
    norm = np.linalg.norm(weight.astype(np.float64), 2)
    # At most the margin, the root of the rank, and the spread of the start vectors above it.
    assert norm <= spectral_norm(weight) <= norm * 1.34 * min(d_in, d_out) ** (1 / 16) * 1.2


def test_a_weight_of_zeros() -> None:
    weight = np.zeros((7, 9), np.float16)
    assert spectral_norm(weight) == 0.0
    operand = operand_of(1, 3, weight, "normal")
    assert not caught(made(weight), operand, np.zeros((3, 7), np.float32))
    wrong = np.zeros((3, 7), np.float32)
    wrong[1, 2] = 1e-30
    assert caught(made(weight), operand, wrong)


@pytest.mark.parametrize("probes", [-1, 0, MAX_PROBES + 1])
def test_a_senseless_number_of_probes(probes: int) -> None:
    with pytest.raises(ValueError, match="probes"):
        Integrity(probes)


# --- what passes


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes, seed=st.integers(0, 1000), mean=st.sampled_from([0.0, 1.0]),
    kind=st.sampled_from(get_args(Rows)), order=st.sampled_from(get_args(Order)), probes=st.integers(1, 4),
)  # fmt: skip
def test_honest_sums_in_any_order_pass(
    shape: tuple[int, int, int], seed: int, mean: float, kind: Rows, order: Order, probes: int
) -> None:
    s, d_out, d_in = shape
    weight = weight_of(seed, d_out, d_in, mean)
    operand = operand_of(seed, s, weight, kind)
    integrity = made(weight, probes=probes, key=seed)
    result = product(weight, operand, order)
    begin(integrity, operand)
    np.testing.assert_array_equal(integrity.verified(NAME, result), result)


@pytest.mark.parametrize("shape", [(700, 200, 300), (3, 30_000, 40), (130, 600, 2000)])
def test_parallel_kernels_agree_with_serial_ones(shape: tuple[int, int, int]) -> None:
    s, d_out, d_in = shape
    weight = weight_of(3, d_out, d_in)
    operand = operand_of(4, s, weight, "normal")
    result = exact(weight, operand)
    integrity = made(weight)
    begin(integrity, operand)
    integrity.expect()
    current = integrity._current
    assert current is not None
    expected = operand.astype(np.float64) @ weight.astype(np.float64).T @ secret(integrity).T
    bounds = tolerance(integrity, operand)
    np.testing.assert_allclose(current[1].tolerance, bounds, rtol=1e-6)
    assert (np.abs(current[1].expected - expected) < 0.1 * bounds[:, None]).all()
    np.testing.assert_array_equal(integrity.verified(NAME, result), result)
    for row in (0, s - 1):
        wrong = result.copy()
        wrong[row, -1] += 100.0 * bounds[row] / abs(secret(integrity)[:, -1]).max()
        assert caught(made(weight), operand, wrong)


# --- what is caught


@settings(max_examples=300, deadline=None)
@given(
    shape=shapes, seed=st.integers(0, 10**6), size=st.floats(0.01, 100.0),
    kind=st.sampled_from(["element", "row", "column", "everywhere", "low rank"]),
)  # fmt: skip
def test_an_error_is_caught_exactly_if_a_probe_sees_it(
    shape: tuple[int, int, int], seed: int, size: float, kind: str
) -> None:
    """A row's error e is seen if some |e·v| exceeds τ. Between 0.75 τ and 1.25 τ rounding decides."""
    s, d_out, d_in = shape
    rng = np.random.default_rng(seed)
    weight = weight_of(seed, d_out, d_in)
    operand = operand_of(seed, s, weight, "normal")
    integrity = made(weight, key=seed)
    bounds = tolerance(integrity, operand)
    error = np.zeros((s, d_out))
    row, column = rng.integers(s), rng.integers(d_out)
    if kind == "element":
        error[row, column] = 1.0
    elif kind == "row":
        error[row] = rng.standard_normal(d_out)
    elif kind == "column":
        error[:, column] = rng.standard_normal(s)
    elif kind == "low rank":
        error = rng.standard_normal((s, 1)) @ rng.standard_normal((1, d_out))
    else:
        error = rng.standard_normal((s, d_out))
    honest = exact(weight, operand)
    wrong = (honest + error * size * bounds[:, None]).astype(np.float32)
    seen = np.abs((wrong.astype(np.float64) - honest) @ secret(integrity).T).max(axis=1) / bounds
    found = caught(integrity, operand, wrong)
    if seen.max() > 1.25:
        assert found
    if seen.max() < 0.75:
        assert not found


@pytest.mark.parametrize("kind", ["one element", "a pair", "dense"])
@pytest.mark.parametrize("ratio", [3.0, 10.0])
def test_the_chance_to_miss_depends_on_the_errors_norm_alone(kind: str, ratio: float) -> None:
    """Over fresh secrets, two probes miss with probability P(|N| < τ/‖e‖)²."""
    weight = weight_of(2, 40, 24)
    operand = operand_of(2, 1, weight, "normal")
    honest = exact(weight, operand)
    error = np.zeros(40)
    if kind == "one element":
        error[7] = 1.0
    elif kind == "a pair":
        error[[3, 9]] = 1.0, -1.0
    else:
        error[:] = np.random.default_rng(1).standard_normal(40)
    error /= np.linalg.norm(error)
    trials, missed = 4000, 0
    norm = spectral_norm(weight)
    for trial in range(trials):
        integrity = Integrity(2, key_of(trial))
        integrity.add(0, lambda: weight, norm)
        bound = tolerance(integrity, operand)[0]
        wrong = (honest + ratio * bound * error).astype(np.float32)
        missed += not caught(integrity, operand, wrong)
    chance = (np.sqrt(2 / np.pi) / ratio) ** 2
    # The normal density is below its peak, and rounding blurs τ: 15 % of the chance, and 5 deviations.
    assert abs(missed - trials * chance) < 0.15 * trials * chance + 5 * np.sqrt(trials * chance)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("rows", [1, 30])
def test_what_is_not_a_number_is_wrong(value: float, rows: int) -> None:
    weight = weight_of(5, 40, 24)
    operand = operand_of(5, rows, weight, "normal")
    wrong = exact(weight, operand)
    wrong[-1, -1] = value
    assert caught(made(weight), operand, wrong)


def test_an_operand_that_is_not_finite_has_no_right_answer() -> None:
    """It is not the worker's fault, and no answer to it is used."""
    weight = weight_of(6, 40, 24)
    operand = operand_of(6, 2, weight, "normal")
    operand[1, 3] = np.inf
    integrity = made(weight)
    begin(integrity, operand)
    with pytest.raises(GeloError, match="not finite") as error:
        integrity.verified(NAME, np.zeros((2, 40), np.float32))
    assert not isinstance(error.value, WorkerError)
    assert secret(integrity).any()


def test_a_failed_check_burns_every_projection() -> None:
    weight = weight_of(7, 40, 24)
    operand = operand_of(7, 2, weight, "normal")
    integrity = made(weight)
    integrity.add(1, lambda: weight)
    projections = list(integrity._projections.values())
    assert caught(integrity, operand, -exact(weight, operand))
    assert not any(p.v.any() or p.z.any() for p in projections)
    assert not integrity._sums.any()
    with pytest.raises(IntegrityError, match="over"):
        integrity.begin(0, 2)
    with pytest.raises(ValueError, match="begun"):
        integrity.verified(NAME, exact(weight, operand))


# --- in the schemes


def checked(name: str, transport: ExactTransport, weight: NDArray[np.float16], probes: int) -> Protection:
    protection = protect(SCHEMES[name], transport, key=3)
    d_out, d_in = weight.shape
    linear = Linear(weight_id=0, name=NAME, d_in=d_in, d_out=d_out, load=lambda: weight)
    protection.provision([linear], probes=probes)
    return protection


def offload(protection: Protection, weight: NDArray[np.float16], rows: Float32) -> Float32:
    d_out, d_in = weight.shape
    out = np.full((len(rows), d_out), np.nan, np.float32)
    linear = Linear(weight_id=0, name=NAME, d_in=d_in, d_out=d_out)
    with protection.forward_session() as session:
        session.linear(linear, rows, [len(rows)], out)
    return out


@pytest.mark.parametrize("n", [1, 5, 120])
@pytest.mark.parametrize("name", sorted(HALF_SCHEMES))
def test_checked_results_are_the_same_bits(name: str, n: int) -> None:
    weight = weight_of(8, 80, 60)
    rows = np.random.default_rng(n).standard_normal((n, 60)).astype(np.float32)
    outs = []
    for probes in (0, 1, 2, 3):
        transport = ExactTransport([weight])
        protection = checked(name, transport, weight, probes)
        for _ in range(3):
            outs.append(offload(protection, weight, rows))
        protection.close()
        assert transport.closed
    for unchecked, one, two, three in zip(outs[:3], outs[3:6], outs[6:9], outs[9:], strict=True):
        np.testing.assert_array_equal(one, unchecked)
        np.testing.assert_array_equal(two, unchecked)
        np.testing.assert_array_equal(three, unchecked)


@pytest.mark.parametrize("name", sorted(HALF_SCHEMES))
def test_a_lie_is_caught_under_every_scheme(name: str) -> None:
    weight = weight_of(9, 80, 60)
    rows = np.random.default_rng(1).standard_normal((2, 60)).astype(np.float32)
    transport = ExactTransport([weight])
    protection = checked(name, transport, weight, 2)
    offload(protection, weight, rows)

    def tamper(result: Float32) -> None:
        result[0] *= np.float32(1.1)

    transport.tamper = tamper
    with pytest.raises(IntegrityError, match=NAME) as error:
        offload(protection, weight, rows)
    assert error.value.code == "integrity_failed"
    assert error.value.fault == "worker"
    transport.tamper = None
    with pytest.raises(IntegrityError, match="over"):
        offload(protection, weight, rows)


@pytest.mark.parametrize("name", sorted(HALF_SCHEMES))
def test_the_operand_cannot_be_changed_under_the_check(name: str) -> None:
    """A worker that writes into the operand it shares and answers for that is caught."""

    class Changing(ExactTransport):
        def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> Float32:
            self._operand *= np.float16(0.5)
            return super().exchange(weight_id, rows, d_in, d_out)

    weight = weight_of(10, 80, 60)
    protection = checked(name, Changing([weight]), weight, 2)
    with pytest.raises(IntegrityError):
        offload(protection, weight, np.ones((2, 60), np.float32))


def test_what_is_used_is_what_was_checked() -> None:
    weight = weight_of(11, 80, 60)
    operand = operand_of(11, 4, weight, "normal")
    shared = exact(weight, operand)
    integrity = made(weight)
    begin(integrity, operand)
    used = integrity.verified(NAME, shared)
    assert not np.shares_memory(used, shared)
    shared[...] = 0.0
    np.testing.assert_array_equal(used, exact(weight, operand))


def test_a_weight_without_values_cannot_be_checked() -> None:
    protection = protect(SCHEMES["plain"], ExactTransport())
    with pytest.raises(ValueError, match="cannot be checked"):
        protection.provision([Linear(weight_id=0, name="w", d_in=2, d_out=2)], probes=2)
