"""Ridge inversion: recovers a planted map, inverts plain rows, and nothing from noise."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers import own_text
from evals.attacks.drivers.inversion import (
    ALPHAS,
    EmbeddingInversion,
    InternalStateInversion,
    Ridge,
    known_openings,
    split,
)
from evals.attacks.drivers.nearest import blocks
from evals.attacks.public import PublicModel

from .planted_inversion import noise, plain, planted, ring, small_model

QKV = (0, "qkv")


@pytest.fixture(scope="module")
def model() -> PublicModel:
    return small_model()


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "SEQUENCES", 128)
    monkeypatch.setattr(own_text, "LENGTH", 16)


def test_ridge_recovers_a_planted_map() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((10, 4)).astype(np.float32)
    x = rng.standard_normal((500, 10)).astype(np.float32)
    ridge = Ridge(x, x @ weights + 3.0, [1e-6, 1e6])
    assert ridge.weights(0) == pytest.approx(weights, abs=1e-3)
    assert ridge.predict(x[:3], 0) == pytest.approx(x[:3] @ weights + 3.0, abs=1e-3)
    assert np.abs(ridge.weights(1)).max() < 1e-4


def test_every_penalty_is_the_normal_equations_solution() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((30, 12)).astype(np.float32)
    y = rng.standard_normal((30, 3)).astype(np.float32)
    ridge = Ridge(x, y)
    centered, target = x - x.mean(axis=0), y - y.mean(axis=0)
    gram = centered.T.astype(np.float64) @ centered
    predictions = ridge(x)
    for index, alpha in enumerate(ALPHAS):
        penalty = alpha * np.trace(gram) / 12 * np.eye(12)
        expected = centered @ np.linalg.solve(gram + penalty, centered.T @ target) + y.mean(axis=0)
        assert predictions[index] == pytest.approx(expected, abs=1e-3)
        assert ridge.predict(x, index) == pytest.approx(predictions[index], abs=1e-4)


def test_fewer_rows_than_columns() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((5, 12)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    assert all(np.isfinite(p).all() for p in Ridge(x, y)(x))


@pytest.mark.parametrize("operand", [plain, ring])
def test_plain_rows_are_inverted(model: PublicModel, operand: object) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, operand, {QKV}, rng)
    outcome = EmbeddingInversion().run(view, truth, rng)
    assert outcome.value >= 0.95
    assert outcome.details["aligned_rows"] >= 0.95
    assert outcome.details["layer"] == 0
    assert outcome.chance < 0.2


@pytest.mark.parametrize(("attack", "place"), [(EmbeddingInversion(), QKV),
                                               (InternalStateInversion(), (4, "qkv"))])  # fmt: skip
def test_noise_is_at_chance(
    model: PublicModel, attack: EmbeddingInversion | InternalStateInversion, place: tuple[int, str]
) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, noise, {place}, rng, prompts=80)
    outcome = attack.run(view, truth, rng)
    # 480 tokens at chance of a few per cent: four standard errors.
    assert abs(outcome.value - outcome.chance) < 0.06
    assert outcome.details["aligned_rows"] < 0.02


def test_deep_rows_are_inverted(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {QKV, (1, "qkv"), (4, "qkv")}, rng)
    outcome = InternalStateInversion().run(view, truth, rng)
    assert outcome.details["layer"] == 4
    assert outcome.details["aligned_rows"] > 0.5 > outcome.chance


def test_a_fixed_secret_map_is_learnt_from_known_captures(model: PublicModel) -> None:
    """No public row helps against it: only the captures of known prompts do."""
    rng = np.random.default_rng(1)
    secret_map = np.linalg.qr(rng.standard_normal((48, 48)))[0].astype(np.float32)
    view, truth = planted(model, lambda rows, r: plain(rows @ secret_map, r), {QKV}, rng, prompts=60)
    outcome = EmbeddingInversion().run(view, truth, rng)
    assert outcome.details["aligned_rows"] > 0.9
    assert all("known captures." in note for note in outcome.notes)


def test_the_shallowest_place_is_attacked(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    for place, layer in (((2, "qkv"), 2.0), ((-1, "lm_head"), -1.0)):
        view, truth = planted(model, plain, {place}, rng, prompts=6)
        outcome = EmbeddingInversion().run(view, truth, rng)
        assert outcome.applicable
        assert outcome.details["layer"] == layer


def test_nothing_deep_on_the_wire(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {QKV}, rng, prompts=2)
    outcome = InternalStateInversion().run(view, truth, rng)
    assert not outcome.applicable
    assert "qkv of layer 0" in outcome.reason


def test_known_and_sought_prompts_are_disjoint(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {QKV}, rng, prompts=5)
    known, sought = split(blocks(view, truth, QKV))
    assert [b.prompt for b in known] == [0, 2, 4]
    assert [b.prompt for b in sought] == [1, 3]
    assert known_openings(view, truth) == [truth.prompts[i].tokens[0] for i in (0, 2, 4)]


def test_reruns_reproduce(model: PublicModel) -> None:
    view, truth = planted(model, noise, {QKV}, np.random.default_rng(1), prompts=6)
    first, second = (EmbeddingInversion().run(view, truth, np.random.default_rng(5)) for _ in range(2))
    assert first == second


def test_own_texts_keep_their_openings_and_repeat(model: PublicModel) -> None:
    openings = [[1, 2, 3, 4], [5, 6, 7, 8]]
    texts = own_text.write(model, openings, 20, 10)
    assert {t[0] for t in texts} == {1, 5}
    assert all(
        np.array_equal(a, b) for a, b in zip(texts, own_text.write(model, openings, 20, 10), strict=True)
    )
    tokens, rows = own_text.own_rows(model, openings, QKV, sequences=20, length=10)[0]
    assert rows == pytest.approx(model.dictionary[tokens], abs=1e-5)
