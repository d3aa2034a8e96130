"""The decode step's one pass over a result: unmasking, and the sums of the integrity check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import IntegrityError, WorkerProtocolError
from tee_runner.protection.base import Linear
from tee_runner.protection.gelo.hd3 import Hd3, Hd3Mask

from .doubles import SINGLE_ROUNDING, ExactTransport, Float32, key_of, matrix_of

ONE = np.float32(1.0)


def mask_of(key: int) -> Hd3Mask:
    return Hd3Mask(Hd3(ExactTransport(), key=key_of(key)), 1)


@settings(max_examples=40, deadline=None)
@given(key=st.integers(1, 50), vectors=st.integers(1, 80), exponent=st.integers(-12, 12))
def test_row_and_sums_are_what_they_should_be(key: int, vectors: int, exponent: int) -> None:
    rng = np.random.default_rng(key)
    d = 16 * vectors
    mask = mask_of(key)
    result = (rng.standard_normal((16, d)) * 2.0**exponent).astype(np.float32)
    v = rng.standard_normal((2, d)).astype(np.float32)
    scales = np.array([2.0], np.float32)
    out, sums = np.full((1, d), np.nan, np.float32), np.full((16, 2), np.nan)
    assert mask.sums_on_the_way(d)
    assert mask.unapply_summed(result, scales, np.float32(0.25), out, v, sums) is False
    exact = result.astype(np.float64)
    expected = (matrix_of(mask).T @ exact)[:1] * 0.125
    size = np.linalg.norm(exact, axis=0) * 0.125
    assert (np.abs(out - expected) <= 16 * SINGLE_ROUNDING * size).all()
    # At most 32 additions a lane, then 16 lanes, each piece then exact in float64.
    terms = np.abs(exact) @ np.abs(v).T.astype(np.float64)
    assert (np.abs(sums - exact @ v.T.astype(np.float64)) <= 64 * SINGLE_ROUNDING * terms).all()
    # The same as unmasking alone.
    alone = np.empty_like(out)
    mask.unapply(result, scales, np.float32(0.25), alone)
    np.testing.assert_allclose(out, alone, rtol=0, atol=float(16 * SINGLE_ROUNDING * size.max()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (7, 513), (8, 511), (15, 527)])
def test_what_is_not_finite_is_noted(value: float, place: tuple[int, int]) -> None:
    mask = mask_of(3)
    result = np.ones((16, 528), np.float32)
    result[place] = value
    out, sums = np.empty((1, 528), np.float32), np.empty((16, 2))
    assert mask.unapply_summed(result, np.ones(1, np.float32), ONE, out, np.ones((2, 528), np.float32), sums)


def test_only_single_rows_of_whole_vectors_take_this_way() -> None:
    two = Hd3Mask(Hd3(ExactTransport(), key=key_of(1)), 2)
    assert not two.sums_on_the_way(64)
    assert not mask_of(1).sums_on_the_way(60)


def checked(weight: Float32) -> tuple[Hd3, Linear, ExactTransport]:
    transport = ExactTransport([weight.astype(np.float16)])
    protection = Hd3(transport, key=key_of(4))
    half = weight.astype(np.float16)
    linear = Linear(weight_id=0, name="w", d_in=half.shape[1], d_out=half.shape[0], load=lambda: half)
    protection.provision([linear], probes=2)
    assert protection.checks_pairs
    return protection, linear, transport


WEIGHT = np.random.default_rng(1).standard_normal((64, 40)).astype(np.float32)


@pytest.mark.parametrize("row", range(16))
def test_a_lie_in_any_row_is_caught(row: int) -> None:
    """Of the operand, not of what comes out of the mask: the verdict tells nothing about the mask."""
    protection, linear, transport = checked(WEIGHT)
    rows, out = np.ones((1, 40), np.float32), np.empty((1, 64), np.float32)
    with protection.forward_session() as session:
        session.linear(linear, rows, [1], out)
    np.testing.assert_allclose(out, rows @ WEIGHT.astype(np.float16).astype(np.float32).T, atol=0.05)

    def tamper(result: Float32) -> None:
        result[row, 5] += np.float32(0.01 * np.abs(result).max())

    transport.tamper = tamper
    with pytest.raises(IntegrityError), protection.forward_session() as session:
        session.linear(linear, rows, [1], out)
    assert not any(p.v.any() for p in protection._integrity._projections.values())  # type: ignore[union-attr]


def test_nothing_finite_is_asked_of_the_worker_for_an_operand_that_is_not() -> None:
    protection, linear, _ = checked(WEIGHT)
    rows, out = np.full((1, 40), np.nan, np.float32), np.empty((1, 64), np.float32)
    with pytest.raises(Exception, match="not finite") as error, protection.forward_session() as session:
        session.linear(linear, rows, [1], out)
    assert not isinstance(error.value, WorkerProtocolError)
