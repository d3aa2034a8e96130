"""A decode step's row: mixed and sent in one call; unmasked and summed in one pass over a result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import IntegrityError, WorkerProtocolError
from tee_runner.protection.base import Linear
from tee_runner.protection.gelo.base import GeloProtection, Mask
from tee_runner.protection.gelo.hd3 import Hd3Mask
from tee_runner.protection.gelo.kernels import block_scales
from tee_runner.protection.gelo.tiles import shield_size

from .doubles import GELO_SCHEMES, SINGLE_ROUNDING, ExactTransport, Float32, key_of, matrix_of


def mask_of(kind: type[GeloProtection], key: int, n: int = 1) -> Mask:
    return kind(ExactTransport(), key=key_of(key)).new_mask(n)


def normal_of(mask: Mask) -> float:
    """What send_row leaves in the factor of the norms of A that row_back applies unnormalised."""
    return float(mask.s) ** -1.5 if isinstance(mask, Hd3Mask) else 1.0


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@settings(max_examples=40, deadline=None)
@given(key=st.integers(1, 50), d=st.integers(1, 200), exponent=st.integers(-20, 20))
def test_what_is_sent_is_what_apply_makes(
    kind: type[GeloProtection], key: int, d: int, exponent: int
) -> None:
    rng = np.random.default_rng(key)
    mask = mask_of(kind, key)
    rows = (rng.standard_normal((1, d)) * 2.0**exponent).astype(np.float32)
    normals = rng.standard_normal(shield_size(1, mask.s, d)).astype(np.float32)
    operand, sent = np.full((2, mask.s, d), 0x7E00, np.uint16)
    factor = mask.send_row(rows, normals, operand, sent)
    scales, expected = np.empty(1, np.float32), np.full((mask.s, d), 0x7E00, np.uint16)
    sigma, scale = block_scales(rows, scales, mask.s - 1)
    mask.apply(rows, scales, normals, np.float32(sigma), np.float32(scale), expected)
    np.testing.assert_array_equal(operand, expected)
    np.testing.assert_array_equal(sent, expected)
    assert factor == normal_of(mask) / (scale * float(scales[0]))


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@settings(max_examples=40, deadline=None)
@given(key=st.integers(1, 50), vectors=st.integers(1, 80), exponent=st.integers(-12, 12))
def test_row_and_sums_are_what_they_should_be(
    kind: type[GeloProtection], key: int, vectors: int, exponent: int
) -> None:
    rng = np.random.default_rng(key)
    d = 16 * vectors
    mask = mask_of(kind, key)
    result = (rng.standard_normal((mask.s, d)) * 2.0**exponent).astype(np.float32)
    v = rng.standard_normal((2, d)).astype(np.float32)
    out, sums = np.full((1, d), np.nan, np.float32), np.full((mask.s, 2), np.nan)
    assert mask.one_row(d)
    assert mask.row_back(result, 0.125 * normal_of(mask), out, v, sums) is False
    exact = result.astype(np.float64)
    expected = (matrix_of(mask).T @ exact)[:1] * 0.125
    size = np.linalg.norm(exact, axis=0) * 0.125
    assert (np.abs(out - expected) <= 16 * SINGLE_ROUNDING * size).all()
    # At most 32 additions a lane, then 16 lanes, each piece then exact in float64.
    terms = np.abs(exact) @ np.abs(v).T.astype(np.float64)
    assert (np.abs(sums - exact @ v.T.astype(np.float64)) <= 64 * SINGLE_ROUNDING * terms).all()
    # The same as unmasking alone.
    alone = np.empty_like(out)
    mask.unapply(result, np.array([2.0], np.float32), np.float32(0.25), alone)
    np.testing.assert_allclose(out, alone, rtol=0, atol=float(16 * SINGLE_ROUNDING * size.max()))


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (7, 513), (8, 511), (-1, 527)])
def test_what_is_not_finite_is_noted(
    kind: type[GeloProtection], value: float, place: tuple[int, int]
) -> None:
    mask = mask_of(kind, 3)
    result = np.ones((mask.s, 528), np.float32)
    result[place] = value
    out, sums = np.empty((1, 528), np.float32), np.empty((mask.s, 2))
    assert mask.row_back(result, 1.0, out, np.ones((2, 528), np.float32), sums)


@pytest.mark.parametrize("kind", GELO_SCHEMES)
def test_only_single_rows_of_whole_vectors_take_this_way(kind: type[GeloProtection]) -> None:
    assert mask_of(kind, 1).one_row(64)
    assert not mask_of(kind, 1, n=2).one_row(64)
    assert not mask_of(kind, 1).one_row(60)


def checked(kind: type[GeloProtection], weight: Float32) -> tuple[GeloProtection, Linear, ExactTransport]:
    transport = ExactTransport([weight.astype(np.float16)])
    protection = kind(transport, key=key_of(4))
    half = weight.astype(np.float16)
    linear = Linear(weight_id=0, name="w", d_in=half.shape[1], d_out=half.shape[0], load=lambda: half)
    protection.provision([linear], probes=2)
    assert protection.checks_pairs
    return protection, linear, transport


WEIGHT = np.random.default_rng(1).standard_normal((64, 40)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "row"), [(kind, row) for kind in GELO_SCHEMES for row in range(kind.block_rows(1))]
)
def test_a_lie_in_any_row_is_caught(kind: type[GeloProtection], row: int) -> None:
    """Of the operand, not of what comes out of the mask: the verdict tells nothing about the mask."""
    protection, linear, transport = checked(kind, WEIGHT)
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


@pytest.mark.parametrize("kind", GELO_SCHEMES)
def test_nothing_finite_is_asked_of_the_worker_for_an_operand_that_is_not(kind: type[GeloProtection]) -> None:
    protection, linear, _ = checked(kind, WEIGHT)
    rows, out = np.full((1, 40), np.nan, np.float32), np.empty((1, 64), np.float32)
    with pytest.raises(Exception, match="not finite") as error, protection.forward_session() as session:
        session.linear(linear, rows, [1], out)
    assert not isinstance(error.value, WorkerProtocolError)
