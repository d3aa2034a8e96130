"""The inverter's network and loss: operands of a batch do not touch, and the loss is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evals.attacks.drivers.inverter import Batch, Inverter, loss
from evals.attacks.drivers.nearest import Block, unit_rows

WIDTH, HIDDEN, VOCABULARY = 12, 8, 40


@pytest.fixture
def model() -> Inverter:
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    skip, offset = rng.standard_normal((WIDTH - 1, HIDDEN), dtype=np.float32), np.ones(HIDDEN, np.float32)
    made = Inverter(WIDTH, skip, offset, width=16, heads=4, layers=2)
    torch.nn.init.normal_(made.leave.weight)
    return made


def operands(rng: np.random.Generator) -> list[Block]:
    """Of five, two and three rows; of the first, three rows are nobody's."""
    return [
        Block(
            prompt=i,
            rows=rng.standard_normal((s, WIDTH), dtype=np.float32),
            tokens=rng.integers(0, VOCABULARY, n),
            aligned=rng.permutation(s)[:n],
        )
        for i, (s, n) in enumerate([(5, 2), (2, 2), (3, 1)])
    ]


def test_an_operand_is_read_alone_and_as_a_set(model: Inverter) -> None:
    found = operands(np.random.default_rng(2))
    together = model(Batch.of([b.rows for b in found])).detach().numpy()
    alone = [model(Batch.of([b.rows])).detach().numpy() for b in found]
    assert together == pytest.approx(np.concatenate(alone), abs=1e-5)
    turned = model(Batch.of([found[0].rows[::-1].copy()])).detach().numpy()
    assert turned[::-1] == pytest.approx(alone[0], abs=1e-5)
    changed = found[0].rows.copy()
    changed[0] += 1.0
    assert np.abs(model(Batch.of([changed])).detach().numpy()[1:] - alone[0][1:]).max() > 1e-3


@pytest.mark.parametrize("masked", [False, True])
def test_loss_against_a_plain_sum(model: Inverter, masked: bool) -> None:
    rng = np.random.default_rng(3)
    found = operands(rng)
    answers = unit_rows(rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32))
    candidates = np.unique(np.concatenate([*(b.tokens for b in found), rng.integers(0, VOCABULARY, 20)]))
    batch = Batch.of([b.rows for b in found])
    found_loss = float(loss(model, batch, found, candidates, answers, masked=masked).detach())

    expected = []
    for block in found:
        predicted = model(Batch.of([block.rows])).detach().numpy().astype(np.float64)
        logits = predicted @ answers[candidates].T * np.exp(3.0)
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        for token, row in zip(block.tokens, block.aligned, strict=True):
            column = int(np.flatnonzero(candidates == token)[0])
            own = 0.0 if masked else -np.log(p[row, column])
            expected.append(own - np.log(p[:, column].mean()))
    assert found_loss == pytest.approx(np.mean(expected), rel=1e-4)
