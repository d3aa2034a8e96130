"""Gram matrices: what an orthogonal mask keeps, and what random operands do not have."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers.gram import (
    Candidates,
    GramDistance,
    GramFingerprint,
    column_scores,
    gram_distance,
    made_up,
)
from evals.attacks.model import Attack, Outcome
from evals.attacks.subspace import unit_scaled
from tests.evals.planted import Place, Rows, TableModel, gaussian, haar, masked, plain, view_of, words

V, D = 600, 192


def bare(rows: Rows, rng: np.random.Generator) -> Rows:
    """A mask without shield rows."""
    return masked(rows, rng, shield=0)


def run(attack: Attack, maker: object, prompts: int = 12) -> Outcome:
    model = TableModel(V, D)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, V, int(rng.integers(12, 20))).tolist() for _ in range(prompts)]
    operands: list[dict[Place, Rows]] = [
        {(0, "qkv"): maker(model.dictionary[t], rng)}
        for t in texts  # type: ignore[operator]
    ]
    view, truth = view_of(model, texts, operands)
    return attack.run(view, truth, np.random.default_rng(2))


def test_distance_is_zero_for_the_rows_and_scale_free() -> None:
    rng = np.random.default_rng(0)
    rows = unit_scaled(rng.standard_normal((20, D)))
    assert gram_distance(rows, rows) == pytest.approx(0.0, abs=1e-12)
    assert gram_distance(8.0 * rows, rows) == pytest.approx(0.0, abs=1e-12)
    assert gram_distance(rows @ haar(D, rng), rows) == pytest.approx(0.0, abs=1e-6)
    assert gram_distance(rows[::-1], rows) > 0.1


def test_distance_of_the_plain_wire_is_rounding_and_of_masks_large() -> None:
    assert run(GramDistance(), plain).value < 1e-3
    assert run(GramDistance(), masked).value > 0.5
    nothing = run(GramDistance(), words)
    assert nothing.value == pytest.approx(nothing.chance, rel=0.1)


@pytest.mark.parametrize("maker", [plain, bare, masked])
def test_the_column_gram_identifies_prompts_through_orthogonal_masks(maker: object) -> None:
    outcome = run(GramFingerprint(), maker)
    assert outcome.value == 1.0
    assert outcome.chance < 0.1


def test_the_row_gram_identifies_only_unmasked_rows_and_its_spectrum_survives_a_bare_mask() -> None:
    shown = run(GramFingerprint(), plain).details
    assert shown["identified by row Gram"] == 1.0
    hidden = run(GramFingerprint(), bare).details
    assert hidden["identified by row Gram"] < 0.3


@pytest.mark.parametrize("maker", [gaussian, words])
def test_random_operands_identify_nobody(maker: object) -> None:
    outcome = run(GramFingerprint(), maker)
    assert outcome.value < 0.1
    assert outcome.details["identified by row Gram"] < 0.1


def test_column_scores_do_not_depend_on_an_orthogonal_mask() -> None:
    rng = np.random.default_rng(0)
    dictionary = rng.standard_normal((V, D)).astype(np.float32)
    prompts = rng.integers(0, V, (30, 10))
    candidates = Candidates.of(dictionary, prompts.tolist())
    operand = unit_scaled(dictionary[prompts[4]]).astype(np.float64)
    whiten = np.eye(D)
    scores = column_scores(operand, candidates, whiten)
    np.testing.assert_allclose(column_scores(haar(10, rng) @ operand, candidates, whiten), scores, atol=1e-5)
    assert int(np.argmax(scores)) == 4
    assert scores[4] == pytest.approx(np.linalg.norm(_deviator(operand)) / np.linalg.norm(operand) ** 2)


def _deviator(rows: Rows) -> Rows:
    gram = rows.T @ rows
    return gram - np.trace(gram) / len(gram) * np.eye(len(gram))


def test_candidates_are_distinct_equally_long_and_from_other_texts() -> None:
    own = [1, 2, 3, 4, 5]
    others = [list(range(10, 40)), list(range(50, 80))]
    made = made_up(own, others, 200, np.random.default_rng(0))
    assert made[0] == (1, 2, 3, 4, 5)
    assert len(set(made)) == len(made) == 200
    assert {len(m) for m in made} == {5}
    assert {t for m in made[1:] for t in m} <= {t for o in [own, *others] for t in o}
    kept = np.isin(np.asarray(made[1:]), others[0] + others[1]).mean()
    assert 0.8 < kept < 0.95


def test_few_texts_give_fewer_candidates_rather_than_none() -> None:
    made = made_up([1], [[2, 3]], 1000, np.random.default_rng(0))
    assert sorted(made) == [(1,), (2,), (3,)]
    assert made[0] == (1,)


@pytest.mark.parametrize("attack", [GramDistance(), GramFingerprint()])
def test_not_applicable_without_the_first_layer(attack: Attack) -> None:
    model = TableModel(V, D)
    wire: Rows = model.dictionary[:3]
    view, truth = view_of(model, [[1, 2, 3], [4, 5, 6]], [{(3, "qkv"): wire}, {(3, "qkv"): wire}])
    outcome = attack.run(view, truth, np.random.default_rng(0))
    assert not outcome.applicable
    assert outcome.reason
