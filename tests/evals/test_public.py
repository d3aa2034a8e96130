"""The public forward: a step after a shared prefix gives the rows of the decoder itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evals.attacks.model import HEAD_LAYER
from evals.attacks.public import PublicModel
from evals.attacks.steps import Place
from tests.evals.tiny import LAYERS, OPS, VOCAB, tiny_model

EVERYWHERE: set[Place] = {(layer, op) for layer in range(LAYERS) for op in OPS} | {(HEAD_LAYER, "lm_head")}
KINDS = {
    "plain": tiny_model(),
    "qk-norm": tiny_model(qk_norm=True),
    "window": tiny_model(window=4),
    "bias": tiny_model(bias=True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def model(request: pytest.FixtureRequest) -> PublicModel:
    found: PublicModel = request.param
    return found


@pytest.mark.parametrize("length", [0, 1, 9])
def test_a_step_gives_the_decoders_rows(model: PublicModel, length: int) -> None:
    rng = np.random.default_rng(length)
    prefix = rng.integers(0, VOCAB, length).tolist()
    candidates = rng.integers(0, VOCAB, 5)
    step = model.step(model.prefix(prefix), candidates, EVERYWHERE)
    expected = model.rows([[*prefix, int(token)] for token in candidates])
    for place in EVERYWHERE:
        theirs = np.stack([rows[place][-1] for rows in expected])
        error = np.linalg.norm(step.rows[place] - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        assert error.max() < 1e-4, place


def test_a_taken_candidate_is_a_prefix(model: PublicModel) -> None:
    tokens = [3, 14, 15, 92, 6]
    walked = model.prefix([])
    for token in tokens:
        walked = model.step(walked, np.array([VOCAB - 1, token]), EVERYWHERE).take(1)
    direct = model.prefix(tokens)
    assert walked.tokens == direct.tokens
    for ours, theirs in zip((*walked.keys, *walked.values), (*direct.keys, *direct.values), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_many_candidates_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = KINDS["plain"], (1, "down")
    prefix = model.prefix([5, 6])
    whole = model.step(prefix, np.arange(50), {place})
    monkeypatch.setattr("evals.attacks.public._STEP_ROWS", 7)
    parts = model.step(prefix, np.arange(50), {place})
    np.testing.assert_allclose(parts.rows[place], whole.rows[place], rtol=1e-4, atol=1e-5)
    assert len(parts.keys) == 2
    np.testing.assert_allclose(parts.keys[1], whole.keys[1], rtol=1e-4, atol=1e-5)


def test_the_dictionary_is_the_first_layers_rows() -> None:
    model = KINDS["plain"]
    rows = model.rows([[7, 8, 9]], {(0, "qkv")})[0]
    np.testing.assert_allclose(rows[0, "qkv"], model.dictionary[[7, 8, 9]], rtol=1e-5)


def test_a_shallow_prefix_is_refused() -> None:
    model = KINDS["plain"]
    with pytest.raises(ValueError, match="the prefix holds 1 layers, 3 are needed"):
        model.step(model.prefix([1, 2], layers=1), np.array([3]), {(2, "qkv")})


def test_a_full_context_is_refused() -> None:
    model = KINDS["plain"]
    with pytest.raises(ValueError, match="fills the context of 128"):
        model.step(model.prefix([1] * 128), np.array([3]), {(0, "qkv")})


def test_a_model_whose_layers_differ_is_refused() -> None:
    model = KINDS["plain"]
    layers = tuple(model.config.layer(index) for index in range(LAYERS))
    other = PublicModel(replace(model.config, layers=layers), model.weights)
    with pytest.raises(ValueError, match="not computed in steps"):
        other.step(other.prefix([]), np.arange(3), EVERYWHERE)
