"""Greedy answers of every family, token by token those of transformers.

Random models have near-ties, which rounding to float16 may decide either way. Prompts are therefore
chosen by the reference alone: those on whose greedy path the best token leads by more than noise
can make up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.plain import Plain

from .small_models import VOCAB, SmallModel, batch_of

PROMPT, TOKENS, CANDIDATES = 12, 36, 48
MASKED_TOKENS = 16
# Root mean square noise of a logit under gelo-hd3, in units of the logits' own: at most the 4e-3
# derived beside the forward pass's tests, half of that as seen. Two logits six deviations of their
# difference apart do not change places.
LEAD = 6 * 2**0.5 * 2e-3

FAMILIES = ["llama3", "qwen2-window", "qwen3", "mistral", "gemma3", "gemma3-mqa", "gemma4", "gemma4-kv"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, small_model: Callable[..., SmallModel]) -> SmallModel:
    return small_model(request.param, mild=True)


@pytest.fixture(scope="module")
def clear_answers(model: SmallModel) -> list[tuple[list[int], list[int]]]:
    """Two prompts and transformers' greedy answers, computed with its own KV cache, of clear lead."""
    prompts = torch.from_numpy(np.random.default_rng(20).integers(0, VOCAB, (CANDIDATES, PROMPT)))
    leads = np.full(CANDIDATES, np.inf)
    answers, fed, cache = [], prompts, None
    with torch.no_grad():
        for _ in range(TOKENS):
            output = model.theirs(fed, cache=cache, use_cache=True)
            cache, logits = output.cache, output.logits[:, -1]
            best = logits.topk(2).values
            spread = logits.square().mean(dim=1).sqrt()
            leads = np.minimum(leads, ((best[:, 0] - best[:, 1]) / spread).numpy())
            fed = logits.argmax(dim=1, keepdim=True)
            answers.append(fed[:, 0])
    clear = np.flatnonzero(leads > LEAD)[:2]
    assert len(clear) == 2, "too few candidates"
    stacked = torch.stack(answers, dim=1)
    return [(prompts[i].tolist(), stacked[i].tolist()) for i in clear]


@pytest.mark.parametrize("kind", [Plain, Hd3], ids=["plain", "gelo-hd3"])
def test_greedy_answers_are_those_of_transformers(
    model: SmallModel, clear_answers: list[tuple[list[int], list[int]]], kind: type[Plain] | type[Hd3]
) -> None:
    opened = model.protection(kind).forward_session
    count = TOKENS if kind is Plain else MASKED_TOKENS
    expected = [(prompt, answer[:count]) for prompt, answer in clear_answers]
    decoder, cache = model.decoder(), model.cache()
    slots = [cache.take() for _ in expected]
    answers: list[list[int]] = [[] for _ in expected]
    fed = [prompt for prompt, _ in expected]
    for _ in range(count):
        parts = [(slot, tokens, 1) for slot, tokens in zip(slots, fed, strict=True)]
        with opened() as session:
            best = decoder.forward(batch_of(parts), cache, session).argmax(axis=1).tolist()
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
        fed = [[token] for token in best]
    assert answers == [answer for _, answer in expected]
