"""Attacks on other wires: not applicable by a check, and successful where what they need is planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evals.attacks.drivers.not_applicable import (
    AttentionScoreInversion,
    InvariantAttack,
    TokenFrequency,
    VocabularyMatching,
    foreign_products,
)
from evals.attacks.drivers.substitution import decipher
from evals.attacks.model import Attack, Capture, Offload, Truth, View
from evals.attacks.public import PublicModel

from .planted_inversion import HIDDEN, MLP, VOCAB, plain, planted, ring, secret, small_model

ALL = [InvariantAttack(), VocabularyMatching(), TokenFrequency(), AttentionScoreInversion()]
PLACES = {(0, "qkv"), (1, "o"), (1, "gate_up"), (1, "down"), (-1, "lm_head")}


@pytest.fixture(scope="module")
def model() -> PublicModel:
    return small_model()


def with_offloads(view: View, offloads: list[Offload]) -> View:
    return replace(
        view, captures=[Capture(prompt=i, offloads=(offload,)) for i, offload in enumerate(offloads)]
    )


@pytest.mark.parametrize("attack", ALL, ids=lambda a: a.name)
@pytest.mark.parametrize("operand", [plain, ring])
def test_linear_offloads_carry_none_of_it(model: PublicModel, attack: Attack, operand: object) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, operand, PLACES, rng, prompts=3, length=7)
    outcome = attack.run(view, truth, rng)
    assert not outcome.applicable
    assert np.isnan(outcome.value)
    assert outcome.reason.startswith("needs ")


def test_reasons_come_from_the_captures(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    reasons = []
    for length in (5, 9):
        view, truth = planted(model, plain, PLACES, rng, prompts=2, length=length)
        reasons.append({a.name: a.run(view, truth, rng).reason for a in ALL})
    assert "at most 5 rows" in reasons[0]["vma"]
    assert "at most 9 rows" in reasons[1]["vma"]
    assert "float16 matrices of widths 48, 64" in reasons[0]["tfma-sda"]
    assert "10 of 10 operands" in reasons[0]["isa-attention"]


def test_products_with_other_weights_are_seen(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, truth = planted(model, plain, {(0, "qkv"), (1, "down")}, rng, prompts=2)
    assert foreign_products(view) == (0, 0)
    weight = model.spec(0, "qkv").load().astype(np.float32)
    operand = view.captures[0].select(0, "qkv")[0].operand
    right = Offload(forward=0, layer=0, op="qkv", operand=operand, result=operand @ weight.T)
    assert foreign_products(with_offloads(view, [right])) == (0, 1)
    wrong = replace(right, result=operand @ rng.permuted(weight.T, axis=1))
    assert foreign_products(with_offloads(view, [wrong])) == (1, 1)
    reason = (
        VocabularyMatching().run(with_offloads(view, [wrong]), Truth(prompts=truth.prompts[:1]), rng).reason
    )
    assert "1 of 1 results tried are not products with the public weight" in reason


def test_a_permuted_table_is_matched(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, _ = planted(model, plain, {(0, "qkv")}, rng, prompts=1)
    order = rng.permutation(VOCAB)
    table = model.embedding[order][:, rng.permutation(HIDDEN)].astype(np.float16)
    rows = {(0, 0, "qkv"): model.embedding[order]}
    view = with_offloads(view, [Offload(forward=0, layer=0, op="qkv", operand=table)])
    truth = Truth(prompts=[secret(0, order.tolist(), rows)])
    assert VocabularyMatching().run(view, truth, rng).value > 0.95
    assert not InvariantAttack().run(view, truth, rng).applicable
    noise = rng.standard_normal(table.shape).astype(np.float16)
    view = with_offloads(view, [Offload(forward=0, layer=0, op="qkv", operand=noise)])
    assert VocabularyMatching().run(view, truth, rng).value < 0.05


def test_invariants_of_gate_products_are_matched(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, _ = planted(model, plain, {(0, "qkv")}, rng, prompts=1)
    order = rng.permutation(VOCAB)
    basis = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))[0].astype(np.float32)
    table = model.embedding[order] @ basis
    weight = model.spec(0, "gate_up").load().astype(np.float32)
    weight = np.concatenate([rng.permutation(weight[:MLP]), weight[MLP:]]) @ basis
    offload = Offload(
        forward=0, layer=0, op="gate_up", operand=table.astype(np.float16),
        result=(table @ weight.T).astype(np.float32),
    )  # fmt: skip
    truth = Truth(prompts=[secret(0, order.tolist(), {(0, 0, "gate_up"): model.embedding[order]})])
    assert InvariantAttack().run(with_offloads(view, [offload]), truth, rng).value > 0.95
    blind = replace(offload, result=rng.standard_normal((VOCAB, 2 * MLP)).astype(np.float32))
    assert InvariantAttack().run(with_offloads(view, [blind]), truth, rng).value < 0.05


def language(rng: np.random.Generator, size: int, length: int) -> list[int]:
    """A Markov chain whose symbols differ in frequency and in what follows them."""
    chain = np.random.default_rng(7).dirichlet(np.linspace(1.0, 0.02, size), size=size).cumsum(axis=1)
    text = [0]
    while len(text) < length:
        text.append(min(int(np.searchsorted(chain[text[-1]], rng.random())), size - 1))
    return text


def test_substituted_ids_are_deciphered(model: PublicModel) -> None:
    rng = np.random.default_rng(1)
    view, _ = planted(model, plain, {(0, "qkv")}, rng, prompts=1)
    substitution = rng.permutation(VOCAB)
    texts = [language(rng, 40, 400) for _ in range(16)]
    truth = Truth(prompts=[secret(i, text) for i, text in enumerate(texts)])

    def seen(ids: list[np.ndarray]) -> View:
        offloads = [Offload(forward=0, layer=0, op="qkv", operand=i.astype(np.uint32)[:, None]) for i in ids]
        return with_offloads(view, offloads)

    outcome = TokenFrequency().run(seen([substitution[t] for t in texts]), truth, rng)
    assert outcome.applicable
    assert outcome.value > 0.8
    scrambled = seen([rng.integers(0, VOCAB, len(t)) for t in texts])
    assert TokenFrequency().run(scrambled, truth, rng).value < 0.1


def test_neighbours_tell_apart_what_frequency_cannot() -> None:
    cycle = [np.array([0, 1, 2, 3] * 50 + [0, 1])]
    key = decipher([(c + 1) % 4 + 10 for c in cycle], cycle)
    assert [key[(c + 1) % 4 + 10] for c in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("flat", [False, True])
def test_attention_scores_are_inverted(model: PublicModel, flat: bool) -> None:
    rng = np.random.default_rng(1)
    view, _ = planted(model, plain, {(0, "qkv")}, rng, prompts=1)
    heads, n, words = model.config.num_heads, 20, 10
    texts = [rng.integers(0, words, n) for _ in range(60)]
    # Scores that are a linear image of each position's embedding, as softmax rows.
    maps = 0.1 * rng.standard_normal((heads, HIDDEN, n)).astype(np.float32)

    def scores(embeddings: np.ndarray) -> Offload:
        values = np.exp(np.einsum("nd,hdm->hnm", embeddings, maps))
        values /= values.sum(axis=2, keepdims=True)
        operand = values.reshape(heads * n, n) if flat else values
        return Offload(forward=0, layer=0, op="qkv", operand=operand.astype(np.float16))

    truth = Truth(prompts=[secret(i, text.tolist()) for i, text in enumerate(texts)])
    outcome = AttentionScoreInversion().run(
        with_offloads(view, [scores(model.embedding[t]) for t in texts]), truth, rng
    )
    assert outcome.value > 0.9
    blind = [scores(rng.standard_normal((n, HIDDEN)).astype(np.float32)) for _ in texts]
    outcome = AttentionScoreInversion().run(with_offloads(view, blind), truth, rng)
    assert outcome.value < 0.25
