"""Integrity of one offload: exact, for errors of every kind, with no false alarms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tee_runner.errors import GeloError, IntegrityError
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.lpn.probes import Probes
from tee_runner.protection.lpn.quantise import SUM_LIMIT, quantise
from tee_runner.protection.lpn.ring import PlainInt8
from tee_runner.protection.lpn.scheme import Lpn

from .words_worker import WordsTransport, key_of, linear_of, small_parameters, transport_for, weight_of

D_IN, D_OUT = 33, 50
WEIGHT = weight_of(1, D_OUT, D_IN)
ROWS = np.random.default_rng(0).standard_normal((3, D_IN)).astype(np.float32)
Tamper = Callable[[np.ndarray], None]


def opened(
    scheme: type[Lpn] | type[PlainInt8], probes: int = 2, key: int = 1
) -> tuple[WordsTransport, Lpn | PlainInt8]:
    transport = transport_for(WEIGHT)
    extra = {"chosen": [small_parameters(D_IN, 40)]} if scheme is Lpn else {}
    protection = scheme(transport, key=key_of(key), **extra)  # type: ignore[arg-type]
    protection.provision([linear_of(WEIGHT)], probes=probes)
    return transport, protection


def answer(protection: Lpn | PlainInt8, rows: np.ndarray) -> np.ndarray:
    out = np.full((len(rows), D_OUT), np.nan, np.float32)
    with protection.forward_session() as session:
        session.linear(linear_of(WEIGHT), rows, [len(rows)], out)
    return out


@pytest.fixture(params=[Lpn, PlainInt8], ids=["lpn", "plain-int8"])
def scheme(request: pytest.FixtureRequest) -> type[Lpn] | type[PlainInt8]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("valuation", range(32))
def test_one_wrong_word_is_rejected_whatever_power_of_two_divides_it(valuation: int) -> None:
    for number in range(4):
        transport, protection = opened(Lpn, key=number + 1)
        generator = np.random.default_rng((valuation, number))
        row, column = (int(generator.integers(bound)) for bound in (3, D_OUT))
        error = np.uint32((2 * int(generator.integers(2**31)) + 1) << valuation & 0xFFFFFFFF)

        def tamper(result: np.ndarray, row=row, column=column, error=error) -> None:  # type: ignore[no-untyped-def]
            result[row, column : column + 1] += error

        transport.tamper = tamper
        with pytest.raises(IntegrityError, match="w0"):
            answer(protection, ROWS)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("shift", [0, 20, 29, 31])
def test_errors_of_any_rank_are_rejected(scheme: type[Lpn] | type[PlainInt8], rank: int, shift: int) -> None:
    transport, protection = opened(scheme)
    generator = np.random.default_rng((rank, shift))
    left = generator.integers(0, 2**32, (3, rank), dtype=np.uint32) | np.uint32(1)
    right = generator.integers(0, 2**32, (rank, D_OUT), dtype=np.uint32) << np.uint32(shift)

    def tamper(result: np.ndarray) -> None:
        result += left @ right

    transport.tamper = tamper
    with pytest.raises(IntegrityError):
        answer(protection, ROWS)


def another_row(result: np.ndarray) -> None:
    result[0] = result[1]


def another_order(result: np.ndarray) -> None:
    result[:, [0, 1]] = result[:, [1, 0]]


def cancelling(result: np.ndarray) -> None:
    result[0, 0] += np.uint32(7)
    result[0, 1] -= np.uint32(7)


def nothing_at_all(result: np.ndarray) -> None:
    result.fill(0)


@pytest.mark.parametrize("tamper", [another_row, another_order, cancelling, nothing_at_all])
def test_plausible_lies_are_rejected(scheme: type[Lpn] | type[PlainInt8], tamper: Tamper) -> None:
    transport, protection = opened(scheme)
    transport.tamper = tamper
    with pytest.raises(IntegrityError):
        answer(protection, ROWS)


def test_one_probe_misses_no_more_than_it_should() -> None:
    """Probes of few bits, so that the bound is in reach: an error of t low zeros needs v's low bits."""
    generator = np.random.default_rng(3)
    n = 20000
    v = generator.integers(0, 16, (n, 2))  # the argument of the module with 4 bits: |E| < 2^4, modulo 2^8
    for E in ((1, 0), (8, 0), (15, 15), (-8, 8), (4, -12)):
        passed = (v @ np.array(E)) % 256 == 0
        assert passed.mean() <= 1 / 16 + 4 * np.sqrt(1 / 16 / n)


def test_probes_are_uniform_and_projected_exactly() -> None:
    _, protection = opened(Lpn, probes=3)
    probe = protection.probes.of(0)
    W = quantise(WEIGHT).values.astype(np.int64)
    assert probe.v.shape == (3, D_OUT)
    np.testing.assert_array_equal(probe.w, probe.v.astype(np.int64) @ W)
    assert np.abs(probe.v.astype(np.float64)).max() > 2**29
    assert len(np.unique(probe.v)) == probe.v.size


def test_honest_answers_pass_at_every_extreme(scheme: type[Lpn] | type[PlainInt8]) -> None:
    _, protection = opened(scheme)
    values = quantise(WEIGHT)
    W = values.values.astype(np.float64) * values.scales[:, None]
    generator = np.random.default_rng(4)
    rows = generator.standard_normal((9, D_IN)).astype(np.float32)
    rows[0] = 0.0
    rows[1, 5] = 1e5
    rows[2] *= 1e30
    rows[3] *= 1e-25
    rows[4] = np.float32(3.4e38)
    rows[5] = np.sign(W[7])  # the worst case of a channel
    rows[6] = -np.sign(W[9])
    rows[7] = 1e-44  # subnormal: counts as zero
    rows[8] = np.where(np.arange(D_IN) % 2, 1e5, -1e-5)
    out = answer(protection, rows)
    assert np.isfinite(out[[0, 1, 2, 3, 5, 6, 7, 8]]).all()
    assert not out[0].any()
    assert not out[7].any()
    steps = np.abs(rows).max(axis=1, keepdims=True) / values.levels
    bound = 0.51 * steps * np.abs(W).sum(axis=1) + 1e-5 * np.abs(rows) @ np.abs(W).T
    exact = rows.astype(np.float64) @ W.T
    chosen = [0, 1, 2, 3, 5, 6, 8]
    assert (np.abs(out - exact)[chosen] <= bound[chosen]).all()


def test_the_worst_row_reaches_the_bound_and_passes() -> None:
    """Weights of one magnitude, a row of all levels: the largest sum that can be, exactly."""
    weight = np.ones((2, 4099), np.float16)
    weight[1] = -1.0
    quantised = quantise(weight)
    transport = transport_for(weight)
    protection = PlainInt8(transport)
    protection.provision([linear_of(weight)], probes=2)
    out = np.empty((1, 2), np.float32)
    with protection.forward_session() as session:
        session.linear(linear_of(weight), np.ones((1, 4099), np.float32), [1], out)
    largest = 127 * 4099 * quantised.levels
    assert SUM_LIMIT // 2 <= largest < SUM_LIMIT
    assert (transport.operands[0].astype(np.int32) == quantised.levels).all()
    np.testing.assert_allclose(out, [[4099, -4099]], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(scheme: type[Lpn] | type[PlainInt8], value: float) -> None:
    transport, protection = opened(scheme)
    sent = len(transport.operands)
    rows = ROWS.copy()
    rows[1, D_IN - 1] = value
    with pytest.raises(GeloError, match="activation for w0 is not finite") as caught:
        answer(protection, rows)
    assert not isinstance(caught.value, IntegrityError)
    assert len(transport.operands) == sent
    answer(protection, ROWS)  # the session lives on


def test_out_of_range_is_rejected_even_without_probes() -> None:
    transport, protection = opened(PlainInt8, probes=0)
    answer(protection, ROWS)
    transport.tamper = lambda result: result.__setitem__((0, 0), np.uint32(SUM_LIMIT))
    with pytest.raises(IntegrityError):
        answer(protection, ROWS)


@pytest.mark.parametrize(
    "value", [SUM_LIMIT - 1, -(SUM_LIMIT - 1), SUM_LIMIT, -SUM_LIMIT, 2**31 - 1, -(2**31)]
)
def test_the_range_ends_where_it_should(value: int) -> None:
    transport, protection = opened(PlainInt8, probes=0)
    transport.tamper = lambda result: result.fill(np.uint32(value & 0xFFFFFFFF))
    if abs(value) < SUM_LIMIT:
        answer(protection, ROWS)
    else:
        with pytest.raises(IntegrityError):
            answer(protection, ROWS)


def test_the_first_rejection_burns_the_probes(scheme: type[Lpn] | type[PlainInt8]) -> None:
    transport, protection = opened(scheme)
    probe = protection.probes.of(0)
    transport.tamper = nothing_at_all
    with pytest.raises(IntegrityError) as caught:
        answer(protection, ROWS)
    assert not probe.v.any()
    assert not probe.w.any()
    transport.tamper = None
    with pytest.raises(IntegrityError, match="over"):
        answer(protection, ROWS)
    # Accept or reject is all that shows: the message is the same for every error.
    assert str(caught.value).startswith("The worker's result for w0 is not the product it was asked for.")


@pytest.mark.parametrize("probes", [1, 2, 5])
def test_any_number_of_probes(probes: int) -> None:
    for wrong in (False, True):
        transport, protection = opened(Lpn, probes=probes)
        if wrong:
            transport.tamper = cancelling
            with pytest.raises(IntegrityError):
                answer(protection, ROWS)
        else:
            answer(protection, ROWS)


def test_too_many_probes_are_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        Probes(17, key_of(1).stream("probes"))


def test_a_bank_s_rows_are_made_for_the_options() -> None:
    options = LpnOptions(bank_rows=100)
    protection = Lpn(transport_for(WEIGHT), options=options, chosen=[small_parameters(D_IN, 40)])
    with pytest.raises(ValueError, match="multiple of 64"):
        protection.provision([linear_of(WEIGHT)])
