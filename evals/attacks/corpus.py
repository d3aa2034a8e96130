"""Prompts: fixed by a seed, of the lengths that the attacks need.

All text comes from :mod:`evals.attacks.corpora.english`: templates and word lists written for this
project, under its licence. A sentence is a template with words drawn at random; a prompt is one to
three sentences.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from evals.attacks.corpora.english import PIECES, SLOTS, TEMPLATES, WORDS
from evals.attacks.model import CorpusName

MIN_TOKENS: Final = 8
MAX_TOKENS: Final = 32
LONG_LENGTHS: Final = (256, 1024, 2048)
DECODE_BATCHES: Final = (1, 2, 4, 8, 16)
DECODE_STEPS: Final = 4
# Forward passes of one text under fresh masks, for attacks that join them.
PASSES: Final = 8


class Encoder(Protocol):
    """The part of a tokenizer that is used here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its token ids."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Prompts, and how they are run.

    ``runs`` has one entry per capture: the indices of the prompts that run together, as one ragged
    batch. An entry that comes again is the same text under fresh masks. ``steps`` counts the decode
    steps after the prefill.
    """

    name: CorpusName
    seed: int
    prompts: tuple[Prompt, ...]
    runs: tuple[tuple[int, ...], ...]
    steps: int = 0
    # What made it, for the record.
    settings: dict[str, int] = field(default_factory=dict)

    def with_batch(self, *sizes: int) -> Corpus:
        """Only the runs of so many sequences each."""
        runs = tuple(run for run in self.runs if len(run) in sizes)
        return replace(self, runs=runs)


def corpus(name: CorpusName, size: int, tokenizer: Encoder, seed: int, *, passes: int = PASSES) -> Corpus:
    """The corpus called ``name``.

    ``short``: ``size`` prompts of 8 to 32 tokens, one capture each; a smaller size is a prefix of a
    larger one. ``long``: ``size`` texts of exactly 256, 1024 and 2048 tokens in turn; the first one runs
    ``passes`` times. ``decode``: ``size`` times each batch of 1, 2, 4, 8 and 16 short prompts, which
    then decode :data:`DECODE_STEPS` steps.

    Raises:
        ValueError: ``size`` or ``passes`` is below 1, or there is no such corpus.
    """
    if size < 1 or passes < 1:
        raise ValueError("a corpus has at least one prompt, each with at least one pass")
    rng = _generator(name, seed)
    settings = {"size": size, "passes": passes if name == "long" else 1}
    if name == "short":
        prompts = _distinct(size, tokenizer, rng, ())
        runs = [(i,) for i in range(size)]
        return _corpus(name, seed, prompts, runs, 0, settings)
    if name == "long":
        prompts = [_composed(LONG_LENGTHS[i % len(LONG_LENGTHS)], tokenizer, rng) for i in range(size)]
        runs = [(i,) for i in range(size) for _ in range(passes if i == 0 else 1)]
        return _corpus(name, seed, prompts, runs, 0, settings)
    if name == "decode":
        prompts = _distinct(size * sum(DECODE_BATCHES), tokenizer, rng, ())
        bounds = np.cumsum([0, *(DECODE_BATCHES * size)]).tolist()
        batches = [tuple(range(first, end)) for first, end in pairwise(bounds)]
        return _corpus(name, seed, prompts, batches, DECODE_STEPS, settings)
    raise ValueError(f"there is no corpus {name!r}")


def candidates(
    count: int,
    tokenizer: Encoder,
    seed: int,
    *,
    include: Sequence[Prompt] = (),
    exclude: Collection[Prompt] = (),
) -> list[Prompt]:
    """``count`` distinct prompts of 8 to 32 tokens, from the generator of the corpora.

    ``include`` are among them, at random places; ``exclude`` are not, nor is any text of theirs.
    About 100 µs each.

    Raises:
        ValueError: more are to be included than there is room for.
    """
    if len(include) > count:
        raise ValueError(f"{len(include)} prompts do not fit among {count} candidates")
    rng = _generator("candidates", seed)
    known = [prompt.text for prompt in (*include, *exclude)]
    drawn = _distinct(count - len(include), tokenizer, rng, known)
    mixed = [*include, *drawn]
    return [mixed[i] for i in rng.permutation(count)]


def _generator(purpose: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def _corpus(
    name: CorpusName, seed: int, prompts: Sequence[Prompt], runs: Sequence[tuple[int, ...]], steps: int,
    settings: dict[str, int],
) -> Corpus:  # fmt: skip
    return Corpus(
        name=name, seed=seed, prompts=tuple(prompts), runs=tuple(runs), steps=steps, settings=settings
    )


def _sentences(rng: np.random.Generator) -> Iterator[str]:
    """Sentences without end. Random numbers are drawn many at a time."""
    widest = max(len(slots) for slots in SLOTS)
    while True:
        chosen = rng.integers(0, len(TEMPLATES), 1024).tolist()
        fractions = rng.random((1024, widest)).tolist()
        for template, row in zip(chosen, fractions, strict=True):
            pieces, slots = PIECES[template], SLOTS[template]
            text = pieces[0]
            for slot, fraction, piece in zip(slots, row, pieces[1:], strict=False):
                words = WORDS[slot]
                text += words[int(fraction * len(words))] + piece
            yield text[0].upper() + text[1:]


def _distinct(
    count: int, tokenizer: Encoder, rng: np.random.Generator, known: Collection[str]
) -> list[Prompt]:
    seen = set(known)
    sentences = _sentences(rng)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        number = int(rng.choice(4, p=(0.0, 0.55, 0.3, 0.15)))
        text = " ".join(next(sentences) for _ in range(number))
        if text in seen:
            continue
        tokens = tokenizer.encode(text)
        if MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
            seen.add(text)
            prompts.append(Prompt(text, tuple(tokens)))
    return prompts


def _composed(length: int, tokenizer: Encoder, rng: np.random.Generator) -> Prompt:
    """Sentences laid end to end, cut after ``length`` tokens."""
    sentences = _sentences(rng)
    text, tokens = "", list[int]()
    while len(tokens) < length:
        text += "".join(next(sentences) + " " for _ in range(1 + (length - len(tokens)) // 32))
        tokens = tokenizer.encode(text)
    kept = tokens[:length]
    return Prompt(tokenizer.decode(kept), tuple(kept))
