"""Nearest neighbour: finds planted rows and nothing in noise; the rules of scoring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evals.attacks.drivers.nearest import (
    Block,
    NearestNeighbour,
    blocks,
    hits_of,
    recovery,
    recovery_interval,
    top_tokens,
    wire_rows,
)
from evals.attacks.model import Capture, Offload, Truth
from evals.attacks.public import PublicModel

from .planted_inversion import noise, plain, planted, ring, secret, small_model

QKV = (0, "qkv")


@pytest.fixture(scope="module")
def model() -> PublicModel:
    return small_model()


@pytest.mark.parametrize("operand", [plain, ring])
def test_plain_rows_are_recovered(model: PublicModel, operand: object) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, operand, {QKV}, rng)
    outcome = NearestNeighbour().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.details["aligned_rows_top_1"] == 1.0
    assert outcome.chance < 0.2
    assert outcome.interval == (1.0, 1.0)


def test_negated_and_permuted_rows_are_recovered(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, lambda rows, r: -plain(rows, r)[::-1], {QKV}, rng)
    outcome = NearestNeighbour().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.details["aligned_rows_top_1"] < 0.5


def test_noise_is_at_chance(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, noise, {QKV}, rng, prompts=60)
    outcome = NearestNeighbour().run(view, truth, rng)
    # 720 tokens, chance about 24 votes of 600 tokens: four standard errors.
    assert abs(outcome.value - outcome.chance) < 0.045
    assert outcome.details["top_1"] <= outcome.details["top_5"] <= outcome.details["top_10"]


def test_lm_head_rows_name_the_next_token(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {(-1, "lm_head")}, rng)
    outcome = NearestNeighbour().run(view, truth, rng)
    assert outcome.value == 1.0
    assert outcome.details["tokens"] == len(view.captures)


def test_without_a_dictionary_it_says_what_it_saw(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {(2, "qkv")}, rng, prompts=2)
    outcome = NearestNeighbour().run(view, truth, rng)
    assert not outcome.applicable
    assert "qkv of layer 2" in outcome.reason


@pytest.mark.parametrize(
    ("operand_rows", "shield", "expected"),
    [(3, 0, [0, 1, 2]), (27, 8, [0, 9, 18]), (48, 8, [0, 16, 32]), (11, 8, [0, 1, 2]), (16, 8, [0, 1, 2])],
)
def test_rows_of_decode_steps_are_aligned_by_block(
    model: PublicModel, operand_rows: int, shield: int, expected: list[int]
) -> None:
    rng = np.random.default_rng(1)
    view, _ = planted(model, plain, {QKV}, rng, prompts=1, parameters={"shield_rows": shield})
    operand = rng.standard_normal((operand_rows, model.config.hidden_size)).astype(np.float16)
    capture = Capture(prompt=0, offloads=(Offload(forward=1, layer=0, op="qkv", operand=operand),))
    three = replace(secret(0, [1]), tokens=((1, 2, 3), (4, 5, 6), (7, 8, 9)), prompt_lengths=(2, 2, 2))
    found = blocks(replace(view, captures=[capture]), Truth(prompts=[three]), QKV)
    assert found[0].tokens.tolist() == [3, 6, 9]
    assert found[0].aligned.tolist() == expected


def test_truth_with_another_number_of_rows_is_refused(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {QKV}, rng, prompts=1)
    other = secret(0, [1, 2], truth.prompts[0].rows)
    with pytest.raises(ValueError, match="2 tokens for 12 data rows"):
        blocks(view, Truth(prompts=[other]), QKV)


def test_top_tokens_is_a_sort() -> None:
    rng = np.random.default_rng(2)
    rows, dictionary = (rng.standard_normal((n, 8), dtype=np.float32) for n in (700, 90))
    scores = rows @ dictionary.T
    best = top_tokens(rows, dictionary, 5, both_signs=True)
    assert np.array_equal(best[..., 0], np.argsort(-scores, axis=1)[:, :5])
    assert np.array_equal(best[..., 1], np.argsort(scores, axis=1)[:, :5])


def test_ring_elements_are_signed() -> None:
    assert wire_rows(np.array([[1, 2**32 - 1]], dtype=np.uint32)).tolist() == [[1.0, -1.0]]


def test_hits_and_their_interval() -> None:
    tokens = np.array([3, 3, 7])
    found = [Block(prompt=p, rows=np.zeros((3, 2), np.float32), tokens=tokens, aligned=np.arange(3))
             for p in range(2)]  # fmt: skip
    hits = hits_of(found, [np.array([[9], [3], [9]]), np.array([[7], [7], [7]])])
    assert [h.tolist() for h in hits.any_row] == [[True, True, False], [False, False, True]]
    assert [h.tolist() for h in hits.aligned] == [[False, True, False], [False, False, True]]
    assert [h.tolist() for h in hits.other] == [[False, False, True], [True, True, False]]
    assert recovery(hits.any_row) == 0.5
    assert recovery_interval(hits.any_row, np.random.default_rng(0)) == pytest.approx((1 / 3, 2 / 3))
    assert hits_of(found[:1], [np.zeros((3, 1))]).other == []


@pytest.mark.model
def test_first_layer_of_the_default_model(smollm2_dir: Path) -> None:
    from tee_runner.models.loader import load_model

    loaded = load_model(smollm2_dir)
    real = PublicModel(loaded.config, loaded.weights)
    rng = np.random.default_rng(3)
    view, truth = planted(real, plain, {QKV}, rng, prompts=4)
    assert NearestNeighbour().run(view, truth, rng).value == 1.0
