"""Prefix candidates on planted operands: all is recovered, and nothing from unrelated ones."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers.prefix import PrefixCandidates
from evals.attacks.model import Capture, Offload, PromptTruth, Truth, View
from evals.attacks.walk import Beam
from tests.evals.tiny import planted, sentences, shielded, tiny_model, unrelated

MODEL = tiny_model()
BEAM = Beam(op="qkv", depth=0.0, widths=(16, 0), prompts=4)


def test_all_is_recovered_in_order() -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(MODEL, sentences(6, rng), shielded, rng)
    outcome = PrefixCandidates(beams=(BEAM,)).run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.details["prompts exact"] == 1.0
    for op, layer in (("o", 0), ("down", 0), ("qkv", 1), ("gate_up", 2)):
        assert outcome.details[f"layer 0 set, ordered by {op} of layer {layer}: prompts exact"] == 1.0
    assert outcome.details["qkv of layer 1 alone: prompts exact"] == 1.0
    assert outcome.details["random subspace: positions"] < 0.2


def test_without_the_first_layer_a_beam_recovers_all() -> None:
    rng = np.random.default_rng(2)
    view, truth = planted(MODEL, sentences(3, rng), shielded, rng, places=lambda layer, op: layer >= 2)
    outcome = PrefixCandidates(beams=(BEAM,)).run(view, truth, rng)
    assert outcome.value == 1.0
    assert "layer 0 set: positions" not in outcome.details


def test_a_narrow_beam_misses_what_the_model_does_not_expect() -> None:
    rng = np.random.default_rng(3)
    view, truth = planted(MODEL, sentences(4, rng), shielded, rng, places=lambda layer, op: layer == 1)
    narrow = Beam(op="qkv", depth=0.0, widths=(8,), prompts=4, opening=8)
    outcome = PrefixCandidates(beams=(narrow,)).run(view, truth, rng)
    label = "qkv of layer 1 alone"
    assert outcome.value < 0.3
    assert outcome.details[f"{label}: truth outside the first 8"] > 0.7


@pytest.mark.parametrize("repeated", [[5, 5, 5, 9, 9, 2, 7, 5], [7, 7], [1, 2, 1, 2, 1, 2, 1]])
def test_repeated_tokens_are_recovered(repeated: list[int]) -> None:
    rng = np.random.default_rng(4)
    view, truth = planted(MODEL, [repeated], shielded, rng)
    outcome = PrefixCandidates(beams=()).run(view, truth, rng)
    assert outcome.details["layer 0 set: prompts exact"] == 1.0


def test_known_tokens_do_not_count() -> None:
    rng = np.random.default_rng(5)
    known = [11, 12, 13]
    view, truth = planted(MODEL, [known + s for s in sentences(3, rng)], shielded, rng)
    outcome = PrefixCandidates(known=known, beams=()).run(view, truth, rng)
    assert outcome.value == 1.0


def test_unrelated_operands_give_chance() -> None:
    rng = np.random.default_rng(6)
    view, truth = planted(MODEL, sentences(16, rng), unrelated, rng)
    outcome = PrefixCandidates(beams=()).run(view, truth, rng)
    assert outcome.value < 0.05
    assert outcome.details["prompts exact"] == 0.0


def test_beams_over_unrelated_operands_give_chance() -> None:
    rng = np.random.default_rng(10)
    right = []
    for _ in range(10):
        view, truth = planted(MODEL, sentences(2, rng), unrelated, rng, places=lambda layer, op: layer == 1)
        outcome = PrefixCandidates(beams=(BEAM,)).run(view, truth, rng)
        right.append(outcome.details["qkv of layer 1 alone: next token right, given the true prefix"])
        assert outcome.details["prompts exact"] == 0.0
    # Two positions of each of 20 prompts are tried before they are given up: 0.1 right is expected.
    assert np.mean(right) < 0.1


def test_a_full_row_space_is_not_applicable() -> None:
    rng = np.random.default_rng(7)
    full = [rng.permutation(120).tolist()]
    view, truth = planted(MODEL, full, shielded, rng, places=lambda layer, op: (layer, op) == (0, "qkv"))
    outcome = PrefixCandidates().run(view, truth, rng)
    assert not outcome.applicable
    assert "128×128" in outcome.reason


def test_the_last_token_from_the_head_alone() -> None:
    rng = np.random.default_rng(8)
    view, truth = planted(MODEL, sentences(4, rng), shielded, rng, places=lambda layer, op: op == "lm_head")
    outcome = PrefixCandidates().run(view, truth, rng)
    # Random prompts: a last token is among the model's first 256 of 400 for some only.
    found = [
        outcome.details["lm_head: last token, the others known"],
        outcome.value,
    ]
    assert found[0] == found[1] >= 0.25


def test_a_batch_is_taken_apart_and_followed() -> None:
    rng = np.random.default_rng(9)
    prompts, after = sentences(3, rng), [[20, 21], [30, 31], [40, 41]]
    prompts[1][:2] = prompts[0][:2]
    whole = MODEL.rows([p + a for p, a in zip(prompts, after, strict=True)])
    offloads = []
    for forward in range(3):
        for place in whole[0]:
            if place[1] == "lm_head":
                continue
            rows = [
                r[place][: len(p)] if forward == 0 else r[place][len(p) + forward - 1 : len(p) + forward]
                for r, p in zip(whole, prompts, strict=True)
            ]
            operand = shielded(np.concatenate(rows), rng)
            offloads.append(Offload(forward=forward, layer=place[0], op=place[1], operand=operand))
    view = View(
        condition="planted", scheme="planted", parameters={"shield_rows": 8, "shield_energy": 4.0},
        corpus="decode", captures=[Capture(prompt=0, offloads=tuple(offloads))], model=MODEL,
    )  # fmt: skip
    secret = PromptTruth(
        prompt=0, text="", tokens=tuple(tuple(p + a) for p, a in zip(prompts, after, strict=True)),
        prompt_lengths=tuple(len(p) for p in prompts), rows={},
    )  # fmt: skip
    outcome = PrefixCandidates().run(view, Truth(prompts=[secret]), rng)
    assert outcome.details["layer 0 set: prompts exact"] == 1.0
    assert outcome.details["decode steps: prompts exact"] == 1.0
