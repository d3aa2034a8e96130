"""Joint diagonalisation over passes, on planted operands."""

from __future__ import annotations

import numpy as np

from evals.attacks import separation as bss
from evals.attacks.drivers.joint_diagonalisation import JointDiagonalisation, common_row_space, stacked

from .planted_mixtures import coloured, gaussian, laplacian, plain, planted_view, ring, shielded


def attacked(sources, mask, n=8, d=2500, passes=4):
    rng = np.random.default_rng(1)
    view, truth = planted_view([sources(n, d, rng)], mask, rng, passes=passes, corpus="long")
    return JointDiagonalisation().run(view, truth, np.random.default_rng(2))


def test_what_passes_share_is_the_data():
    rng = np.random.default_rng(3)
    rows = gaussian(6, 100, rng)
    passes = [bss.as_float(shielded(rows, rng)) for _ in range(3)]
    assert common_row_space(passes[:1]).shape == (8, 100)
    basis = common_row_space(passes)
    assert basis.shape == (6, 100)
    np.testing.assert_allclose(
        np.linalg.norm(rows @ basis.T, axis=1) / np.linalg.norm(rows, axis=1), 1, atol=1e-4
    )


def test_one_demixing_exists_where_the_mask_is_used_again():
    rng = np.random.default_rng(4)
    rows = coloured(5, 3000, rng)
    mixing = bss.random_rotation(5, rng)
    assert stacked([mixing @ rows] * 3, rows, rng).pooled.min() >= 0.95


def test_fresh_masks_only_disturb_the_one_demixing():
    rng = np.random.default_rng(5)
    alone, together = [], []
    for _ in range(8):
        rows = coloured(5, 3000, rng)
        passes = [bss.random_rotation(5, rng) @ rows for _ in range(8)]
        alone.append(stacked(passes[:1], rows, rng).pooled.mean())
        together.append(stacked(passes, rows, rng).pooled.mean())
    assert np.mean(alone) >= 0.95
    assert 1 - np.mean(together) > 3 * (1 - np.mean(alone))


def test_plain_rows_are_seen():
    outcome = attacked(gaussian, plain)
    assert outcome.value > 0.999
    assert outcome.chance < 0.95


def test_coloured_rows_are_separated_at_every_number_of_passes():
    outcome = attacked(coloured, shielded)
    curve = next(c for c in outcome.plots[0].curves if "common row space, SOBI" in c.label)
    assert list(curve.x) == [1, 2, 4]
    assert min(curve.y) >= 0.95
    assert outcome.details["layer0.qkv: rows shared by all passes"] == 8


def test_white_gaussian_rows_are_not():
    outcome = attacked(gaussian, shielded, n=40)
    assert outcome.interpretable
    assert outcome.details["recovered"] <= 0.05
    assert abs(outcome.value - outcome.chance) < 0.2


def test_ring_elements_are_accepted_and_give_nothing():
    outcome = attacked(laplacian, ring)
    assert outcome.value < 0.3
    assert outcome.details["layer0.qkv: rows shared by all passes"] == 0


def test_one_pass_is_not_applicable():
    outcome = attacked(laplacian, shielded, passes=1)
    assert not outcome.applicable
    assert "no text was captured twice" in outcome.reason


def test_the_whitening_guard_is_named():
    outcome = attacked(laplacian, shielded, d=12)
    assert not outcome.applicable
    assert "10x12" in outcome.reason
