"""Captures for the distinguishing game: two prompts, each many times under fresh secrets."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from evals.attacks.corpus import Corpus, Encoder, Prompt

# Captures of either prompt. Half train, half are scored: an advantage of 0 has an interval of ±0.25.
EACH: Final = 64
# With 8 shield rows a power of two, so that no scheme pads: nothing but content differs.
TOKENS: Final = 24

_TEXTS: Final = (
    "The patient was admitted at night with chest pain and a history of heart disease, and the ward "
    "physician ordered an electrocardiogram before anything else was done.",
    "Our quarterly revenue grew by nine percent because two large customers renewed early, while the "
    "cost of shipping fell again for the third time in a row this year.",
)


def game_corpus(each: int, tokenizer: Encoder, seed: int) -> Corpus:
    """Two prompts of :data:`TOKENS` tokens, ``each`` captures of either, in random order.

    The order is random so that drift over time does not tell them apart.

    Raises:
        ValueError: the tokenizer makes a text shorter than that.
    """
    prompts = []
    for text in _TEXTS:
        tokens = tokenizer.encode(text)[:TOKENS]
        if len(tokens) < TOKENS:
            raise ValueError(f"the tokenizer makes only {len(tokens)} tokens of a game prompt")
        prompts.append(Prompt(tokenizer.decode(tokens), tuple(tokens)))
    rng = np.random.default_rng([seed, zlib.crc32(b"game")])
    order = rng.permutation(np.repeat([0, 1], each)).tolist()
    return Corpus(
        name="game", seed=seed, prompts=tuple(prompts), runs=tuple((i,) for i in order),
        settings={"each": each},
    )  # fmt: skip
