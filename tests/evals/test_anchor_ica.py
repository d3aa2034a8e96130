"""FastICA beside known rows, on planted operands."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks import separation as bss
from evals.attacks.drivers.anchor_ica import (
    AnchorIca,
    leading_quarter,
    projected,
    random_half,
    ridge_residual,
)

from .planted_mixtures import gaussian, laplacian, plain, planted_view, ring, shielded


def attacked(sources, mask, n=(8, 9, 10), d=1500):
    rng = np.random.default_rng(1)
    view, truth = planted_view([sources(k, d, rng) for k in n], mask, rng)
    return AnchorIca().run(view, truth, np.random.default_rng(2))


def masked(rng):
    rows = laplacian(8, 400, rng)
    operand = bss.as_float(shielded(rows, rng))
    return bss.Mixture(operand=operand, features=operand, rows=rows), np.arange(8) < 3


def test_ridge_removes_the_anchors_and_keeps_the_rest():
    mixture, known = masked(np.random.default_rng(3))
    left = ridge_residual(mixture, known)
    assert left.operand.shape == (10 - 3, 400)
    np.testing.assert_array_equal(left.rows, mixture.rows[3:])
    basis = np.linalg.svd(left.operand, full_matrices=False)[2]
    unit = mixture.rows / np.linalg.norm(mixture.rows, axis=1, keepdims=True)
    inside = np.linalg.norm(unit @ basis.T, axis=1)
    assert inside[3:].min() > 0.999
    assert inside[:3].max() < 0.6


def test_projection_leaves_nothing_of_the_anchors():
    mixture, known = masked(np.random.default_rng(4))
    left = projected(mixture, known)
    assert (
        np.abs(left.features @ mixture.rows[:3].T).max()
        < 1e-3 * np.abs(mixture.operand @ mixture.rows[:3].T).max()
    )
    assert bss.whiten(left.features)[0].shape[0] == 10 - 3


def test_anchors_are_the_first_quarter_or_a_random_half():
    rng = np.random.default_rng(5)
    np.testing.assert_array_equal(np.flatnonzero(leading_quarter(8, rng)), [0, 1])
    halves = {tuple(np.flatnonzero(random_half(8, rng))) for _ in range(20)}
    assert {len(half) for half in halves} == {4}
    assert len(halves) > 1


def test_plain_rows_are_seen():
    outcome = attacked(gaussian, plain)
    assert outcome.value > 0.999
    assert outcome.details["recovered"] == 1.0


@pytest.mark.parametrize("variant", ["half known, ridge, blind", "half known, projection, equalised"])
def test_non_gaussian_rows_are_separated(variant):
    outcome = attacked(laplacian, shielded)
    assert outcome.interpretable
    assert outcome.value >= 0.95
    assert outcome.details[f"layer0.qkv, {variant}: recovered"] >= 0.9


def test_gaussian_rows_are_not():
    outcome = attacked(gaussian, shielded, n=(20,) * 8)
    assert outcome.details["recovered"] <= 0.02
    assert abs(outcome.value - outcome.chance) < 0.1


def test_ring_elements_are_accepted_and_give_nothing():
    outcome = attacked(laplacian, ring)
    assert outcome.value < 0.3
    assert outcome.details["recovered"] == 0.0


def test_one_row_has_no_anchor():
    outcome = attacked(laplacian, shielded, n=(1,))
    assert not outcome.applicable
    assert "two data rows" in outcome.reason
