"""A trained inverter: a small transformer reads all rows of an operand and names their tokens.

It starts at the ridge solution (a residual path), sees whole operands, so that it can combine
rows, and trains on operands that the attacker makes himself with the scheme's public code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evals.attacks.drivers.inversion import Pairs, Ridge, known_openings, split
from evals.attacks.drivers.nearest import (
    Block,
    Float32,
    Hits,
    Int64,
    Place,
    blocks,
    describe_places,
    hits_of,
    random_operand,
    recovery,
    recovery_interval,
    shallowest,
    top_tokens,
    unit_rows,
)
from evals.attacks.drivers.own_text import own_rows, training_pairs
from evals.attacks.drivers.simulate import can_simulate, simulate
from evals.attacks.kept import kept
from evals.attacks.model import Attack, Outcome, Report, Truth, View

# Plain rows must be inverted at least this well for a failure elsewhere to mean anything.
CONTROL = 0.5
_ALPHA = 1e-3
# At layer 0, how often training operands are of tokens drawn evenly, not of text.
_EVENLY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Size and budget of the inverter."""

    width: int = 256
    heads: int = 8
    layers: int = 2
    steps: int = 150
    operands: int = 16
    learning_rate: float = 1e-3
    # Tokens that compete with the true ones in a step's softmax, drawn afresh each time.
    rivals: int = 1024
    # Fraction of a step's operands that are captures of known prompts.
    captured: float = 0.1
    # How often the inverter is compared with its best state so far.
    checkpoints: int = 5


Sampler = Callable[[np.random.Generator], Block]
Source = Callable[[int, np.random.Generator], tuple[Int64, Float32]]
Predictor = Callable[[Sequence[Block]], list[Float32]]


def features(rows: Float32) -> Float32:
    """Rows at norm √d, and the logarithm of their norm in the operand: ``(s, d + 1)``."""
    norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.concatenate(
        [rows * (np.sqrt(rows.shape[1]) / norms), np.log(norms / norms.mean())], axis=1, dtype=np.float32
    )


def train(
    sample: Sampler,
    judged: Sequence[Block],
    start: Pairs,
    answers: Float32,
    training: Training,
    rng: np.random.Generator,
    progress: Report = lambda fraction: None,
    *,
    masked: bool,
) -> Predictor:
    """Fit an inverter on the operands that ``sample`` draws; ``start`` is what ridge starts from.

    The loss is that of the set of tokens of an operand under the mean of all rows' predictions (a
    mask may move a token to any row) and, unless ``masked``, that of the token of each row. The
    state that recovers most of ``judged`` is kept, the untrained one included; one that recovers all ends
    the training, since none is better.
    Returns predicted embeddings of norm 1 ``(s, hidden)`` for each operand.
    """
    import torch

    from evals.attacks.drivers.inverter import Batch, Inverter, loss

    torch.manual_seed(int(rng.integers(2**31)))
    ridge = Ridge(start.rows, answers[start.tokens], [_ALPHA])
    offset = ridge.predict(np.zeros((1, start.rows.shape[1]), dtype=np.float32), 0)[0]
    model = Inverter(
        start.rows.shape[1] + 1, ridge.weights(0), offset,
        width=training.width, heads=training.heads, layers=training.layers,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, weight_decay=0.01, fused=True
    )
    steps = max(1, training.steps)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warm)
            * 0.5
            * (1.0 + np.cos(np.pi * min(1.0, step / max(1, training.steps))))
        ),
    )

    def predict(operands: Sequence[Block]) -> list[Float32]:
        predicted: list[Float32] = []
        with torch.no_grad():
            for begin in range(0, len(operands), 32):
                part = operands[begin : begin + 32]
                out = model(Batch.of([features(b.rows) for b in part])).numpy()
                predicted += np.split(out, np.cumsum([len(b.rows) for b in part])[:-1])
        return predicted

    def keep_best(best: float, state: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        right = recovery(_score(judged, predict, answers).any_row)
        if right > best:
            return right, {name: value.clone() for name, value in model.state_dict().items()}
        return best, state

    best, state = keep_best(-1.0, {})
    for step in range(training.steps):
        if best >= 1.0:
            break
        found = [sample(rng) for _ in range(training.operands)]
        batch = Batch.of([features(b.rows) for b in found])
        drawn = rng.integers(0, len(answers), training.rivals)
        candidates = np.unique(np.concatenate([*(b.tokens for b in found), drawn]))
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch, found, candidates, answers, masked=masked).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, training.steps // training.checkpoints) == 0:
            best, state = keep_best(best, state)
        progress((step + 1) / training.steps)
    model.load_state_dict(state)
    return predict


def _sampler(
    view: View, known: Sequence[Block], shapes: Sequence[Block], source: Source,
    captured: float,
) -> Sampler:  # fmt: skip
    """Captures of known prompts, and simulated operands of the shapes seen."""
    can = can_simulate(view.scheme, view.parameters)

    def sample(rng: np.random.Generator) -> Block:
        if known and (not can or rng.random() < captured):
            return known[int(rng.integers(len(known)))]
        shape = shapes[int(rng.integers(len(shapes)))]
        tokens, rows = source(len(shape.tokens), rng)
        s = max(len(tokens), len(shape.rows) - len(shape.tokens) + len(tokens))
        scheme = view.scheme if can else "plain"
        operand = simulate(rows, s, scheme, view.parameters, rng)
        return Block(prompt=-1, rows=operand, tokens=tokens, aligned=np.arange(len(tokens)))

    return sample


class TransformerInversion(Attack):
    """IMA with a trained inverter."""

    name = "ima-transformer"
    title = "IMA (transformer)"
    source = "Morris et al., EMNLP 2023, trained inverters; AloePri (arXiv 2603.01499), paper-like IMA"
    assumes = (
        "Public weights and code: operands of own rows under own masks for training, and the captures "
        "of the half of the prompts that are known"
    )
    measures = (
        "Fraction of tokens of unknown prompts that are the nearest embedding of the prediction for any "
        "row of their operand (TTRSR, top 1 of the whole vocabulary)"
    )

    def __init__(self, training: Training | None = None) -> None:
        self._training = training or Training()

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        place = shallowest(view)
        if place is None:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no qkv and no LM head on the wire ({describe_places(view)})",
            )  # fmt: skip
        found = blocks(view, truth, place)
        source, start = _material(view, truth, place)
        answers = unit_rows(view.model.embedding)
        known, sought = split(found)
        predict = self._train(view, known, sought, source, start, rng, lambda f: progress(0.9 * f))
        hits = _score(sought, predict, answers)
        blind = [replace(b, rows=random_operand(b.rows, rng)) for b in sought]
        value = recovery(hits.any_row)
        control = value if view.scheme == "plain" else self._control(view, truth, place)
        progress(1.0)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=value,
            chance=recovery(_score(blind, predict, answers).any_row),
            interval=recovery_interval(hits.any_row, rng),
            details={
                "aligned_rows": recovery(hits.aligned),
                "other_operand": recovery(hits.other),
                "control_plain": control,
                "layer": float(place[0]),
                "most steps": float(self._training.steps),
                "tokens": float(sum(len(h) for h in hits.any_row)),
            },
            interpretable=control >= CONTROL,
            reason="" if control >= CONTROL else f"recovers only {control:.1%} of plain rows' tokens",
        )

    def _train(
        self, view: View, known: Sequence[Block], sought: Sequence[Block], source: Source, start: Pairs,
        rng: np.random.Generator, progress: Report = lambda fraction: None,
    ) -> Predictor:  # fmt: skip
        """Half of the known operands may be trained on, by the others the best state is chosen."""
        can = can_simulate(view.scheme, view.parameters)
        sample = _sampler(view, known[::2], known or sought, source, self._training.captured)
        judged = known[1::2] or known or [sample(rng) for _ in range(self._training.operands)]
        return train(
            sample, judged, start, unit_rows(view.model.embedding), self._training, rng, progress,
            masked=can and view.scheme != "plain",
        )  # fmt: skip

    def _control(self, view: View, truth: Truth, place: Place) -> float:
        """The same inverter on plain rows of the same prompts; once per model and prompts."""

        def control() -> float:
            rng = np.random.default_rng(0)
            plain = replace(view, scheme="plain", parameters={})
            found = [
                replace(b, rows=simulate(rows, len(rows), "plain", {}, rng), aligned=np.arange(len(rows)))
                for b, rows in zip(blocks(view, truth, place), _plain_rows(view, truth, place), strict=True)
            ]
            known, sought = split(found)
            source, start = _material(view, truth, place)
            predict = self._train(plain, known, sought, source, start, rng)
            return recovery(_score(sought, predict, unit_rows(view.model.embedding)).any_row)

        prompts = tuple(s.tokens for s in truth.prompts)
        return kept(view.model, ("transformer control", place, self._training, prompts), control)


def _plain_rows(view: View, truth: Truth, place: Place) -> list[Float32]:
    """Plaintext rows behind every captured operand at ``place``: for the control only."""
    layer, op = place
    return [
        secret.rows[offload.forward, layer, op]
        for capture, secret in zip(view.captures, truth.prompts, strict=True)
        for offload in capture.select(layer, op)
    ]


def _material(view: View, truth: Truth, place: Place) -> tuple[Source, Pairs]:
    """What the attacker makes rows of: a source of at most n rows with tokens, and pairs for ridge.

    Pieces of texts that the public model wrote; at layer 0, where a row depends on its token alone,
    every second time any tokens of the vocabulary.
    """
    first = place == (0, "qkv")
    corpus = own_rows(view.model, known_openings(view, truth), place)
    dictionary = view.model.dictionary

    def source(n: int, rng: np.random.Generator) -> tuple[Int64, Float32]:
        if first and rng.random() < _EVENLY:
            tokens = rng.integers(0, len(dictionary), n)
            return tokens, dictionary[tokens]
        tokens, rows = corpus[int(rng.integers(len(corpus)))]
        if place[1] == "lm_head":
            at = rng.integers(0, len(tokens), n)
            return tokens[at], rows[at]
        begin = int(rng.integers(max(1, len(tokens) - n + 1))) if first else 0
        return tokens[begin : begin + n], rows[begin : begin + n]

    if first:
        return source, Pairs.of(dictionary, np.arange(len(dictionary)))
    return source, Pairs.of(*training_pairs(corpus))


def _score(sought: Sequence[Block], predict: Predictor, answers: Float32) -> Hits:
    predicted = predict(sought)
    named = top_tokens(np.concatenate(predicted), answers, 1)
    return hits_of(sought, np.split(named, np.cumsum([len(p) for p in predicted])[:-1]))
