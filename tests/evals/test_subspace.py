"""Bases, residuals and leverages against plain NumPy and planted rows."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.subspace import (
    basis,
    complement,
    joint_basis,
    joint_residuals,
    leverages,
    noise_edge,
    random_basis,
    representations,
    residuals,
    residuals_many,
    unit_scaled,
    wire_values,
)
from tests.evals.planted import Rows, haar, masked


def reference(candidates: Rows, rows: Rows) -> Rows:
    c, b = candidates.astype(np.float64), rows.astype(np.float64)
    return np.linalg.norm(c - c @ b.T @ b, axis=1) / np.linalg.norm(c, axis=1)


@pytest.mark.parametrize("rank", [0, 1, 10, 31, 33, 60, 64])
def test_residuals_are_those_of_the_definition(rank: int) -> None:
    rng = np.random.default_rng(rank)
    rows = random_basis(rank, 64, rng)
    candidates = rng.standard_normal((5000, 64)).astype(np.float32)
    candidates[:rank] = rng.standard_normal((rank, rank)) @ rows
    np.testing.assert_allclose(residuals(candidates, rows), reference(candidates, rows), atol=2e-6)


def test_residuals_of_many_bases_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    bases = [random_basis(r, 96, rng) for r in (0, 5, 90, 40, 96)]
    candidates = rng.standard_normal((100, 96)).astype(np.float32)
    for own, rows in zip(residuals_many(candidates, bases), bases, strict=True):
        np.testing.assert_allclose(own, reference(candidates, rows), atol=2e-6)


def test_a_zero_candidate_is_outside() -> None:
    rows = random_basis(3, 8, np.random.default_rng(0))
    assert residuals(np.zeros((1, 8), np.float32), rows)[0] == 1.0


@pytest.mark.parametrize(("distinct", "n"), [(5, 5), (40, 300), (88, 1000)])
def test_rank_is_that_of_distinct_rows_although_rounding_fills_the_space(distinct: int, n: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((distinct, 128))
    chosen = np.concatenate([np.arange(distinct), rng.integers(0, distinct, n - distinct)])
    operand = masked(rows[chosen], rng)
    found = basis(operand)
    assert len(found) == distinct + 8
    np.testing.assert_allclose(found @ found.T, np.eye(len(found)), atol=1e-5)
    assert residuals(rows.astype(np.float32), found).max() < 5e-3
    assert residuals(rng.standard_normal((200, 128)).astype(np.float32), found).min() > 0.2
    assert len(basis(operand, rtol=0.0)) > len(found) or n == distinct


def test_noise_edge_bounds_the_rounding_and_not_by_much() -> None:
    exact = np.random.default_rng(0).standard_normal((200, 300))
    rounded = exact.astype(np.float16)
    largest = np.linalg.norm(rounded - exact, 2)
    assert largest < noise_edge(rounded) < 1.5 * largest


def test_complement_and_basis_span_everything() -> None:
    rows = random_basis(20, 50, np.random.default_rng(0))
    both = np.concatenate([rows, complement(rows)])
    np.testing.assert_allclose(both @ both.T, np.eye(50), atol=1e-5)


def test_words_are_read_as_signed_and_by_bytes() -> None:
    operand = np.array([[0xFFFFFFFF, 0x80000001, 5, 0x7F0000FE]], dtype=np.uint32)
    np.testing.assert_array_equal(wire_values(operand), [[-1, -(2**31) + 1, 5, 0x7F0000FE]])
    views = representations(operand)
    np.testing.assert_array_equal(views["low byte"], [[-1, 1, 5, -2]])
    np.testing.assert_array_equal(views["high byte"], [[-1, -128, 0, 127]])
    assert list(representations(np.zeros((1, 4), np.float16))) == ["values"]


def test_norms_are_scaled_to_one_to_two_by_powers_of_two() -> None:
    rows = np.random.default_rng(0).standard_normal((50, 8)) * np.logspace(-6, 6, 50)[:, None]
    rows[3] = 0.0
    scaled = unit_scaled(rows.astype(np.float32))
    norms = np.linalg.norm(np.delete(scaled, 3, axis=0), axis=1)
    assert norms.min() >= 1.0 - 1e-6
    assert norms.max() < 2.0
    factors = np.delete(scaled / np.where(rows == 0, 1, rows), 3, axis=0)
    np.testing.assert_allclose(np.log2(factors), np.round(np.log2(factors)), atol=1e-5)
    assert not scaled[3].any()


@pytest.mark.parametrize("s", [20, 60, 200])
def test_leverages_are_those_of_the_definition(s: int) -> None:
    rng = np.random.default_rng(s)
    operand = rng.standard_normal((s, 64)).astype(np.float32)
    candidates = rng.standard_normal((300, 64)).astype(np.float32)
    ridge = 0.01
    inverse = np.linalg.inv(operand.T.astype(np.float64) @ operand + ridge * np.eye(64))
    expected = ridge * np.einsum("nd,de,ne->n", candidates, inverse, candidates)
    np.testing.assert_allclose(leverages(candidates, operand, ridge), expected, rtol=1e-3, atol=1e-6)


def test_rows_of_a_full_operand_have_leverage_below_one() -> None:
    rng = np.random.default_rng(0)
    rows = unit_scaled(rng.standard_normal((90, 64)))
    operand = masked(rows, rng)
    ridge = noise_edge(operand) ** 2
    assert (leverages(rows, operand) / ridge).max() < 1.0
    others = unit_scaled(rng.standard_normal((2000, 64)))
    assert np.mean(leverages(others, operand) / ridge > 1.0) > 0.5


def test_joint_rows_are_found_where_each_operand_is_full() -> None:
    rng = np.random.default_rng(0)
    n, widths = 100, (64, 64, 80)
    blocks = [rng.standard_normal((400, w)).astype(np.float32) for w in widths]
    A = haar(n + 8, rng)
    operands = [masked(b[:n], rng, mask=A) * np.float16(2.0**k) for k, b in enumerate(blocks)]
    assert all(len(basis(u)) == u.shape[1] for u in operands)
    joint = joint_basis(operands)
    assert len(joint) == n + 8
    scaled = [unit_scaled(b) for b in blocks]
    scores = joint_residuals(scaled, joint)
    assert scores[:n].max() < 5e-3
    assert scores[n:].min() > 0.2
    # One block of another candidate is enough to leave the space.
    swapped = [scaled[0][:n], scaled[1][:n], np.roll(scaled[2][:n], 1, axis=0)]
    assert joint_residuals(swapped, joint).min() > 0.1


def test_joint_rows_are_not_in_the_space_under_a_fresh_mask_per_operand() -> None:
    rng = np.random.default_rng(0)
    blocks = [rng.standard_normal((400, 64)).astype(np.float32) for _ in range(3)]
    joint = joint_basis([masked(b[:100], rng) for b in blocks])
    # Rows of one block still have small coefficients, so that theirs are the smaller residuals.
    assert joint_residuals([unit_scaled(b[:100]) for b in blocks], joint).min() > 0.2
