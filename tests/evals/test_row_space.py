"""Row space: planted rows are found, absent ones are not."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers.row_space import RowSpace, blind_count, bucket, judge, ranking, simulated_wire
from evals.attacks.model import Outcome
from evals.attacks.subspace import basis, residuals
from tests.evals.planted import TableModel, gaussian, masked, plain, view_of, words

V, D = 1500, 128


def run(
    maker: object, *, n: int = 20, prompts: int = 12, distinct: int = V, corpus: str = "short"
) -> Outcome:
    model = TableModel(V, D)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, distinct, n).tolist() for _ in range(prompts)]
    operands = [{(0, "qkv"): maker(model.dictionary[t], rng)} for t in texts]  # type: ignore[operator]
    view, truth = view_of(model, texts, operands, corpus)  # type: ignore[arg-type]
    return RowSpace().run(view, truth, np.random.default_rng(2))


@pytest.mark.parametrize("maker", [plain, masked])
def test_planted_rows_are_all_found(maker: object) -> None:
    outcome = run(maker)
    assert outcome.value == 1.0
    assert outcome.interval == (1.0, 1.0)
    assert outcome.chance < 0.05
    assert outcome.details["average precision"] == 1.0
    assert outcome.details["blind count: recall"] == outcome.details["blind count: precision"] == 1.0
    assert outcome.details["every true below every false"] == 1.0
    assert outcome.details["recall, 17-32 rows"] == 1.0


@pytest.mark.parametrize("maker", [gaussian, words])
def test_an_operand_without_the_rows_tells_nothing(maker: object) -> None:
    outcome = run(maker, prompts=40)
    assert outcome.interval is not None
    assert outcome.interval[0] <= outcome.chance + 0.01
    assert outcome.value < 0.05
    assert outcome.details["blind count: recall"] < 0.05


def test_a_full_space_is_at_chance() -> None:
    outcome = run(masked, n=3 * D, prompts=3)
    assert outcome.details["rank"] == D
    alike = outcome.details["chance if all tokens were alike"]
    assert abs(outcome.value - alike) < 4 * np.sqrt(alike / (3 * 2 * D))
    assert "recall where rank = d" in outcome.details


def test_many_rows_of_few_tokens_are_found_although_s_exceeds_d() -> None:
    outcome = run(masked, n=3 * D, prompts=3, distinct=60)
    assert outcome.value == 1.0
    assert outcome.details["recall where s ≥ d but rank < d"] == 1.0


def test_a_finer_wire_shows_smaller_residuals() -> None:
    details = run(masked).details
    label = "what if the wire were float32 (simulated): "
    assert details[label + "recall"] == 1.0
    assert details[label + "residual of true tokens"] < 0.01 * details["residual of true tokens"]


def test_the_simulated_wire_has_the_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((10, 64)).astype(np.float32)
    operand = simulated_wire(rows, 8, 4.0, rng)
    assert operand.shape == (18, 64)
    assert residuals(rows, basis(operand)).max() < 1e-4


def test_not_applicable_without_the_first_layer() -> None:
    model = TableModel(V, D)
    view, truth = view_of(model, [[1, 2, 3]], [{(2, "qkv"): model.dictionary[:3]}])
    outcome = RowSpace().run(view, truth, np.random.default_rng(0))
    assert not outcome.applicable
    assert "layer 2" in outcome.reason


def test_runs_repeat() -> None:
    assert run(gaussian) == run(gaussian)


def test_the_blind_count_stops_at_the_largest_step() -> None:
    scores = np.array([1e-4, 2e-4, 3e-4, 0.3, 0.4, 0.5], dtype=np.float32)
    assert blind_count(scores, 5)[0] == 3
    assert blind_count(scores, 2)[0] == 1


def test_equal_scores_are_ordered_at_random() -> None:
    rng = np.random.default_rng(0)
    firsts = {int(ranking(np.zeros(50, np.float32), rng)[0]) for _ in range(40)}
    assert len(firsts) > 15


def test_a_ranking_is_scored_by_hand() -> None:
    scores = np.array([0.1, 0.2, 0.3, 0.4, 0.9], dtype=np.float32)
    found = judge(scores, np.array([0, 2]), 4, np.random.default_rng(0))
    assert found.hits.tolist() == [True, False]
    assert found.precision == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert not found.separated


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 1, 1), (2, 2, 2), (3, 3, 4), (256, 129, 256), (257, 257, 512)]
)
def test_buckets_are_powers_of_two(n: int, low: int, high: int) -> None:
    assert bucket(n) == (low, high)
