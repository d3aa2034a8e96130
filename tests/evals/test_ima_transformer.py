"""The trained inverter: passes its control, learns through its attention, and finds nothing in noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evals.attacks.drivers import own_text
from evals.attacks.drivers.ima_transformer import Training, TransformerInversion, features, train
from evals.attacks.drivers.inversion import Pairs
from evals.attacks.drivers.nearest import Block, top_tokens, unit_rows
from evals.attacks.drivers.simulate import can_simulate, simulate
from evals.attacks.public import PublicModel

from .planted_inversion import noise, plain, planted, ring, small_model

QKV = (0, "qkv")
SMALL = Training(width=32, heads=4, steps=20, operands=8, rivals=256)
SHIELD = {"shield_rows": 8, "shield_energy": 4.0}


@pytest.fixture(scope="module")
def model() -> PublicModel:
    return small_model()


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "SEQUENCES", 32)
    monkeypatch.setattr(own_text, "LENGTH", 16)


@pytest.mark.parametrize(("operand", "scheme"), [(plain, "plain"), (ring, "ring in clear")])
def test_plain_rows_are_inverted(model: PublicModel, operand: object, scheme: str) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, operand, {QKV}, rng, scheme=scheme)
    outcome = TransformerInversion(SMALL).run(view, truth, rng)
    assert outcome.value >= 0.95
    assert outcome.interpretable
    assert outcome.chance < 0.3


def test_noise_is_at_chance_and_the_control_passes(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, noise, {QKV}, rng, prompts=60, scheme="gelo-haar", parameters=SHIELD)
    outcome = TransformerInversion(SMALL).run(view, truth, rng)
    assert abs(outcome.value - outcome.chance) < 0.06
    assert outcome.details["control_plain"] >= 0.95
    assert outcome.interpretable


def test_a_failed_control_is_not_interpretable(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, noise, {QKV}, rng, scheme="plain")
    outcome = TransformerInversion(SMALL).run(view, truth, rng)
    assert not outcome.interpretable
    assert "of plain rows' tokens" in outcome.reason


def test_rows_are_combined(model: PublicModel) -> None:
    """Each row hides in a pad that the operand's last row gives away: a map of single rows fails."""
    rng = np.random.default_rng(2)
    answers = unit_rows(model.embedding)
    dictionary = model.dictionary

    def sample(r: np.random.Generator) -> Block:
        tokens = r.integers(0, len(answers), 6)
        pad = 3.0 * r.standard_normal(dictionary.shape[1]).astype(np.float32)
        rows = np.concatenate([dictionary[tokens] + pad, 6.0 * pad[None]])
        return Block(prompt=0, rows=rows, tokens=tokens, aligned=np.arange(6))

    training = replace(SMALL, width=128, steps=250, operands=16, learning_rate=2e-3, rivals=512)
    start = Pairs.of(dictionary, np.arange(len(dictionary)))
    judged, tests = [sample(rng) for _ in range(16)], [sample(rng) for _ in range(40)]

    def right(steps: int) -> float:
        predict = train(
            sample, judged, start, answers, replace(training, steps=steps), np.random.default_rng(3),
            masked=False,
        )  # fmt: skip
        return float(np.mean([
            (top_tokens(rows[:6], answers, 1)[:, 0] == block.tokens).mean()
            for rows, block in zip(predict(tests), tests, strict=True)
        ]))  # fmt: skip

    untrained, trained = right(0), right(250)
    assert untrained < 0.2
    assert trained > untrained + 0.3


def test_reruns_reproduce(model: PublicModel) -> None:
    view, truth = planted(model, noise, {QKV}, np.random.default_rng(1), prompts=6)
    attack = TransformerInversion(replace(SMALL, steps=5))
    first, second = (attack.run(view, truth, np.random.default_rng(5)) for _ in range(2))
    assert first == second


def test_features_do_not_depend_on_scale() -> None:
    rows = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    assert features(rows) == pytest.approx(features(4.0 * rows), abs=1e-5)
    assert features(rows).shape == (4, 9)


@pytest.mark.parametrize("scheme", ["gelo-haar", "gelo-dct4", "gelo-hd3"])
def test_simulated_masks_are_orthogonal(scheme: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((8, 64)).astype(np.float32)
    rows *= (1.5 / np.linalg.norm(rows, axis=1))[:, None]
    operand = simulate(rows, 16, scheme, {**SHIELD, "shield_energy": 0.0}, rng)
    assert operand.shape == (16, 64)
    assert operand.T @ operand == pytest.approx(rows.T @ rows, abs=1e-2)
    shielded = simulate(rows, 16, scheme, SHIELD, rng)
    assert np.linalg.norm(shielded) ** 2 == pytest.approx(8 * 1.5**2 * (1 + 16), rel=0.2)


def test_simulated_masks_have_the_condition_number_asked_for() -> None:
    rng = np.random.default_rng(1)
    rows = np.eye(8, 64, dtype=np.float32)
    operand = simulate(rows, 8, "paper", {"condition_number": 50.0}, rng)
    singular = np.linalg.svd(operand, compute_uv=False)
    assert singular[0] / singular[-1] == pytest.approx(50.0, rel=0.05)


def test_unknown_schemes_are_not_simulated() -> None:
    assert not can_simulate("lpn", {})
    with pytest.raises(ValueError, match="lpn"):
        simulate(np.ones((2, 4), np.float32), 2, "lpn", {}, np.random.default_rng(1))
