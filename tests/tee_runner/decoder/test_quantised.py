"""Every family under `lpn` gives the very logits of `plain-int8`, its control."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tee_runner.protection.base import Linear
from tee_runner.protection.lpn.ring import PlainInt8
from tee_runner.protection.lpn.scheme import Lpn
from tests.tee_runner.protection.lpn.words_worker import key_of, small_parameters, transport_for

from .small_models import VOCAB, SmallModel, batch_of

FAMILIES = ["llama3", "qwen2-window", "qwen3", "mistral", "gemma3", "gemma4", "gemma4-kv"]
PROMPTS, TOKENS = (23, 5), 12


@pytest.mark.parametrize("name", FAMILIES)
def test_blinding_changes_no_bit_of_the_logits(name: str, small_model: Callable[..., SmallModel]) -> None:
    model = small_model(name, mild=True)
    specs = list(model.ours.weights.linears())
    weights = [spec.load() for spec in specs]
    handles = [
        Linear(weight_id=i, name=spec.name, d_in=spec.d_in, d_out=spec.d_out, load=spec.load)
        for i, spec in enumerate(specs)
    ]
    chosen = [small_parameters(d) for d in {spec.d_in for spec in specs}]
    operands, logits = [], []
    for protection in (
        PlainInt8(transport := transport_for(*weights)),
        Lpn(blinded := transport_for(*weights), key=key_of(1), chosen=chosen),
    ):
        protection.provision(handles, probes=2)
        decoder, cache = model.decoder(), model.cache()
        generator = np.random.default_rng(5)
        fed = [generator.integers(0, VOCAB, n).tolist() for n in PROMPTS]
        slots = [cache.take() for _ in fed]
        steps = []
        for step in range(TOKENS):
            # The second sequence joins late: a decode row beside a prompt.
            parts = [(slots[0], fed[0], 1)]
            if step >= 2:
                parts.append((slots[1], fed[1], 1))
            with protection.forward_session() as session:
                found = decoder.forward(batch_of(parts), cache, session).copy()
            steps.append(found)
            for i in range(len(parts)):
                fed[i] = [int(found[i].argmax())]
        logits.append(steps)
        operands.append(protection.transport.operands)
    for plain, lpn in zip(*logits, strict=True):
        np.testing.assert_array_equal(lpn.view(np.uint32), plain.view(np.uint32))
    # What went out was another thing.
    assert len(blinded.operands) > len(transport.operands)
    assert not any(
        np.array_equal(a, b) for a, b in zip(operands[0], operands[1][-len(operands[0]) :], strict=True)
    )
