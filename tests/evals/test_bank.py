"""The bank on planted operands: the true sentence comes first, and anywhere for unrelated ones."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers.bank import (
    Bank,
    Sentences,
    expected_precision,
    near_duplicates,
    precision,
    score,
)
from evals.attacks.public import PublicModel
from tests.evals.tiny import planted, sentences, shielded, tiny_model, unrelated

MODEL = tiny_model()


def bank(model: PublicModel, count: int) -> list[tuple[int, ...]]:
    return [tuple(s) for s in sentences(count, np.random.default_rng(123))]


def attack(**settings: int) -> Bank:
    return Bank(sizes=(500, 2000), source=bank, forwarded=200, headed=50, hard=40, **settings)


def test_the_true_sentence_comes_first() -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(MODEL, sentences(6, rng), shielded, rng)
    outcome = attack().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.chance == pytest.approx(expected_precision(500))
    assert outcome.details["layer 0: 2000 candidates"] == 1.0


def test_order_is_seen_by_deeper_rows_only() -> None:
    rng = np.random.default_rng(2)
    view, truth = planted(MODEL, sentences(8, rng, 10, 14), shielded, rng)
    details = attack().run(view, truth, rng).details
    # 19 or 20 of 40 candidates tie at layer 0: the mean of 1 / rank over them is about 0.18.
    assert details["one word or the order changed, layer 0"] < 0.6
    assert details["one word or the order changed, in order"] == 1.0


def test_unrelated_operands_give_chance() -> None:
    rng = np.random.default_rng(3)
    view, truth = planted(MODEL, sentences(30, rng), unrelated, rng)
    outcome = attack().run(view, truth, rng)
    assert outcome.value < 10 * outcome.chance
    assert outcome.interval is not None
    assert outcome.interval[0] < 0.05


@pytest.mark.parametrize("shallowest", [2, 1])
def test_without_the_first_layer_candidates_are_run_through(shallowest: int) -> None:
    rng = np.random.default_rng(4)
    view, truth = planted(
        MODEL, sentences(4, rng), shielded, rng, places=lambda layer, op: layer >= shallowest
    )
    outcome = attack().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.chance == pytest.approx(expected_precision(200))


def test_the_head_alone_is_enough() -> None:
    rng = np.random.default_rng(5)
    view, truth = planted(MODEL, sentences(4, rng), shielded, rng, places=lambda layer, op: op == "lm_head")
    outcome = attack().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.chance == pytest.approx(expected_precision(50))


def test_more_rows_than_columns_leave_leverage() -> None:
    rng = np.random.default_rng(6)
    prompts = [rng.permutation(400)[:124].tolist() for _ in range(6)]
    view, truth = planted(
        MODEL, prompts, shielded, rng, corpus="long", places=lambda layer, op: (layer, op) == (0, "qkv")
    )
    outcome = attack(opening=12).run(view, truth, rng)
    label = "layer 0, leverage at 132 rows: 500 candidates"
    assert outcome.details[label] > 20 * outcome.chance


def test_nothing_on_the_wire_is_not_applicable() -> None:
    rng = np.random.default_rng(7)
    view, truth = planted(MODEL, sentences(2, rng), shielded, rng, places=lambda layer, op: False)
    assert not attack().run(view, truth, rng).applicable


def test_a_score_is_over_distinct_tokens() -> None:
    tokens = np.array([0.5, 0.5, 20.0, 0.5], dtype=np.float32)
    found = score(Sentences.of([(0, 1, 1), (0, 2), (2, 2, 0, 0), (0, 1, 3)]), tokens)
    assert found[1] == found[2]
    # More explained tokens come first, an unexplained one last.
    assert found[3] < found[0] < found[1]


def test_precision_of_ties_is_that_of_a_random_order() -> None:
    rng = np.random.default_rng(8)
    tied = [precision(np.zeros(9, dtype=np.float32), 0.0, rng) for _ in range(4000)]
    assert np.mean(tied) == pytest.approx(expected_precision(10), abs=0.02)
    assert precision(np.array([-1.0, 1.0], dtype=np.float32), 0.0, rng) == 0.5


def test_near_duplicates_differ_from_the_truth() -> None:
    true = (1, 2, 3, 4, 5)
    others = near_duplicates(true, 60, 400, np.arange(400, dtype=np.int32), np.random.default_rng(9))
    assert len(set(others)) == 59
    assert true not in others
    permuted = [s for s in others if sorted(s) == sorted(true)]
    assert 25 <= len(permuted) <= 31
