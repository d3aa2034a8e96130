"""The distinguishing game on operands whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from evals.attacks.classifiers import clopper_pearson, logistic, perceptron, play, roc
from evals.attacks.drivers.distinguish import Distinguish
from evals.attacks.model import Capture, Offload, Outcome, PromptTruth, Truth, View

N, D, K = 12, 96, 8
PROMPTS = (tuple(range(N)), tuple(range(100, 100 + N)))


class Rows:
    """A model whose layer-0 rows are fixed Gaussians per prompt."""

    def __init__(self, seed: int) -> None:
        self.of = {p: np.random.default_rng([seed, p[0]]).standard_normal((N, D)) for p in PROMPTS}

    def rows(self, sequences: Sequence[Sequence[int]], wanted: Any) -> list[dict[Any, Any]]:
        return [{(0, "qkv"): self.of[tuple(s)].astype(np.float32)} for s in sequences]


def plain(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rows.astype(np.float16)


def masked(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    shield = rng.standard_normal((K, D)) * 4
    A, _ = np.linalg.qr(rng.standard_normal((N + K, N + K)))
    return (A @ np.vstack([rows, shield])).astype(np.float16)


def ring(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2**32, (N, D), dtype=np.uint32)


def noise(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((N + K, D)).astype(np.float16)


def game(cipher: Any, seed: int = 5, each: int = 48) -> Outcome:
    rng = np.random.default_rng(seed)
    model = Rows(seed)
    order = rng.permutation(np.repeat([0, 1], each))
    captures, truths = [], []
    for i, which in enumerate(order):
        operand = cipher(model.of[PROMPTS[which]], rng)
        captures.append(Capture(prompt=i, offloads=(Offload(forward=0, layer=0, op="qkv", operand=operand),)))
        truths.append(PromptTruth(prompt=i, text="", tokens=(PROMPTS[which],), prompt_lengths=(N,), rows={}))
    view = View(
        condition="planted", scheme=cipher.__name__, parameters={}, corpus="game", captures=captures,
        model=cast("Any", model),
    )  # fmt: skip
    return Distinguish().run(view, Truth(prompts=truths), rng)


def test_plain_operands_are_told_apart() -> None:
    outcome = game(plain)
    assert outcome.value == 1.0
    assert outcome.interval is not None
    assert outcome.interval[0] > 0.8


def test_masked_operands_are_told_apart_by_their_row_space() -> None:
    outcome = game(masked)
    assert outcome.value > 0.95
    assert outcome.details["advantage: row space, logistic"] > 0.95
    # The bytes alone say nothing: a fresh mask has mixed them.
    assert outcome.details["advantage: byte histogram, logistic"] < 0.5


@pytest.mark.parametrize("cipher", [noise, ring])
def test_random_operands_leave_chance_in_the_interval(cipher: Any) -> None:
    outcome = game(cipher)
    assert outcome.interval is not None
    assert outcome.interval[0] <= 0.0 <= outcome.interval[1]
    assert outcome.interval[1] - outcome.interval[0] < 0.7


def test_reruns_reproduce_the_numbers() -> None:
    assert game(masked, each=8).details == game(masked, each=8).details


def test_too_few_captures_are_not_applicable() -> None:
    outcome = game(plain, each=3)
    assert not outcome.applicable
    assert "too few" in outcome.reason


@pytest.mark.parametrize("classifier", [logistic, perceptron])
def test_classifiers_learn_a_planted_direction_and_nothing_else(classifier: Any) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    x = rng.standard_normal((200, 6))
    x[:, 2] += 2.5 * labels
    shown, hidden = slice(0, 100), slice(100, 200)
    right = np.mean((classifier(x[shown], labels[shown], x[hidden], rng) > 0) == labels[hidden])
    assert right > 0.8
    shuffled = rng.permutation(labels)
    right = np.mean((classifier(x[shown], shuffled[shown], x[hidden], rng) > 0) == shuffled[hidden])
    assert 0.35 < right < 0.65


def test_the_perceptron_learns_what_no_line_separates() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((600, 2))
    labels = ((x[:, 0] * x[:, 1]) > 0).astype(np.int64)
    scores = {f: f(x[:300], labels[:300], x[300:], rng) for f in (logistic, perceptron)}
    right = {f: np.mean((s > 0) == labels[300:]) for f, s in scores.items()}
    assert right[perceptron] > 0.9
    assert right[logistic] < 0.65


def test_the_interval_covers_chance_as_often_as_it_says() -> None:
    """Choosing among pairs by cross-validation must not make noise look like a leak."""
    covered = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        features = {name: rng.standard_normal((64, 5)) for name in "abc"}
        low, high = play(features, np.arange(64) % 2, rng).interval
        covered += low <= 0.0 <= high
    assert covered >= 18


def test_clopper_pearson_known_values() -> None:
    assert clopper_pearson(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert clopper_pearson(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert clopper_pearson(10, 10)[1] == 1.0


def test_roc_of_perfect_and_of_constant_scores() -> None:
    labels = np.array([1, 0, 1, 0])
    false, true = roc(np.array([2.0, -1.0, 1.0, -2.0]), labels)
    assert list(zip(false, true, strict=True))[2] == (0.0, 1.0)
    false, true = roc(np.zeros(4), labels)
    assert (list(false), list(true)) == ([0.0, 1.0], [0.0, 1.0])
