"""Leverage: full operands of shared masks give their rows away, of fresh masks they do not."""

from __future__ import annotations

import numpy as np

from evals.attacks.drivers.leverage import Leverage, joint_offloads, shared_mask
from evals.attacks.model import Outcome
from tests.evals.planted import Place, Rows, TableModel, gaussian, haar, masked, view_of, words

V, D, N = 1200, 48, 80
PLACES: tuple[Place, ...] = ((0, "qkv"), (0, "o"), (0, "gate_up"), (1, "qkv"))


def run(kind: str, prompts: int = 3) -> Outcome:
    model = TableModel(V, D)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, V, N).tolist() for _ in range(prompts)]
    operands: list[dict[Place, Rows]] = []
    for text in texts:
        rows = model.rows([text], set(PLACES))[0]
        shared = haar(N + 8, rng)
        wire: dict[Place, Rows] = {}
        for place in PLACES:
            if kind == "words":
                wire[place] = words(rows[place], rng)
            else:
                wire[place] = masked(rows[place], rng, mask=shared if kind == "shared" else None)
        operands.append(wire)
    view, truth = view_of(model, texts, operands, "long")
    return Leverage().run(view, truth, np.random.default_rng(4))


def test_the_joint_test_finds_every_position_where_one_operand_finds_none() -> None:
    outcome = run("shared")
    assert outcome.value == 1.0
    assert outcome.chance < 0.02
    assert outcome.details["joint, first token: recovered"] == 1.0
    assert outcome.details["joint, next token: recovered"] == 1.0
    assert outcome.details["layer 0 qkv alone: recovered"] < 0.2
    assert outcome.details["joint residual of true tokens"] < 0.01


def test_the_joint_test_fails_under_fresh_masks_and_on_words() -> None:
    for kind in ("fresh", "words"):
        outcome = run(kind)
        assert outcome.value < 0.2
        assert outcome.interval is not None
        assert outcome.interval[0] <= outcome.chance


def test_leverage_of_one_full_operand_beats_chance() -> None:
    details = run("shared").details
    recall = details["layer 0 leverage, s ≥ d, up to 128 rows: recall"]
    assert recall > 0.25 > 2 * details["layer 0 leverage, s ≥ d, up to 128 rows: random operand"]


def test_a_wide_operand_alone_is_used_where_masks_are_fresh() -> None:
    model = TableModel(V, N + 40)
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, V, N).tolist() for _ in range(2)]
    operands = [
        {place: masked(r, rng) for place, r in model.rows([t], set(PLACES[:2]))[0].items()} for t in texts
    ]
    view, truth = view_of(model, texts, operands, "long")
    outcome = Leverage().run(view, truth, np.random.default_rng(8))
    assert outcome.value == 1.0
    assert "alone" in outcome.notes[0]


def short(maker: object) -> Outcome:
    model = TableModel(V, D)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, V, 16).tolist() for _ in range(8)]
    operands: list[dict[Place, Rows]] = [
        {(0, "qkv"): maker(model.dictionary[t], rng)}
        for t in texts  # type: ignore[operator]
    ]
    view, truth = view_of(model, texts, operands)
    return Leverage().run(view, truth, np.random.default_rng(6))


def test_short_prompts_are_found_and_random_operands_are_at_chance() -> None:
    assert short(masked).value == 1.0
    nothing = short(gaussian)
    assert nothing.value < 0.1
    assert abs(nothing.value - nothing.chance) < 0.06


def test_the_joint_matrix_takes_offloads_of_equally_many_rows_until_it_is_wide_enough() -> None:
    model = TableModel(V, D)
    wire: dict[Place, Rows] = {
        (1, "qkv"): np.zeros((80, D), np.float16),
        (0, "o"): np.zeros((90, D), np.float16),
        (0, "qkv"): np.zeros((80, D), np.float16),
        (0, "down"): np.zeros((80, D), np.float16),
        (2, "qkv"): np.zeros((80, D), np.float16),
    }
    view, _ = view_of(model, [[1, 2]], [wire])
    chosen = [(o.layer, o.op) for o in joint_offloads(view.captures[0])]
    assert chosen == [(0, "qkv"), (0, "down"), (1, "qkv")]
    assert shared_mask(view) == [0]


def test_not_applicable_without_two_operands_of_a_pass() -> None:
    model = TableModel(V, D)
    text = list(range(10))
    view, truth = view_of(model, [text], [{(0, "qkv"): model.dictionary[text]}], "long")
    outcome = Leverage().run(view, truth, np.random.default_rng(0))
    assert not outcome.applicable
    assert outcome.reason
