"""Prompts have the lengths they should, and the seed decides them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from evals.attacks.corpora.english import SLOTS, TEMPLATES, WORDS
from evals.attacks.corpus import DECODE_BATCHES, LONG_LENGTHS, Prompt, candidates, corpus


class WordTokenizer:
    """One id per space-separated word."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_every_template_can_be_filled() -> None:
    assert {slot for slots in SLOTS for slot in slots} == set(WORDS)
    assert len(set(TEMPLATES)) == len(TEMPLATES)
    for name, words in WORDS.items():
        assert len(set(words)) == len(words), name
        assert all(word and word == word.strip() for word in words), name


def test_short_prompts() -> None:
    tokenizer = WordTokenizer()
    made = corpus("short", 64, tokenizer, 1)
    lengths = [len(p.tokens) for p in made.prompts]
    assert len({p.text for p in made.prompts}) == 64
    assert min(lengths) >= 8
    assert max(lengths) <= 32
    # Varied: no length makes up a third, and both ends of the range occur.
    assert np.bincount(lengths).max() < 64 / 3
    assert min(lengths) <= 9
    assert max(lengths) >= 24
    assert all(tuple(tokenizer.encode(p.text)) == p.tokens for p in made.prompts)
    assert made.runs == tuple((i,) for i in range(64))
    assert made.steps == 0


def test_the_seed_decides() -> None:
    texts = [[p.text for p in corpus("short", 64, WordTokenizer(), seed).prompts] for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])


def test_a_small_corpus_is_the_beginning_of_a_large_one() -> None:
    small, large = (corpus("short", size, WordTokenizer(), 3).prompts for size in (64, 512))
    assert [p.text for p in small] == [p.text for p in large[:64]]


def test_long_texts() -> None:
    tokenizer = WordTokenizer()
    made = corpus("long", 4, tokenizer, 1, passes=3)
    assert [len(p.tokens) for p in made.prompts] == [*LONG_LENGTHS, LONG_LENGTHS[0]]
    assert made.runs == ((0,), (0,), (0,), (1,), (2,), (3,))
    assert all(tokenizer.decode(p.tokens) == p.text for p in made.prompts)
    # English repeats itself, but not much.
    assert len(set(made.prompts[0].tokens)) > 128


def test_decode_batches() -> None:
    made = corpus("decode", 2, WordTokenizer(), 1)
    assert [len(run) for run in made.runs] == [*DECODE_BATCHES, *DECODE_BATCHES]
    flat = [i for run in made.runs for i in run]
    assert flat == list(range(len(made.prompts)))
    assert made.steps > 0
    eight = made.with_batch(8)
    assert [len(run) for run in eight.runs] == [8, 8]
    assert eight.prompts == made.prompts


@pytest.mark.parametrize(("size", "passes"), [(0, 1), (1, 0)])
def test_an_empty_corpus_is_refused(size: int, passes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        corpus("short", size, WordTokenizer(), 1, passes=passes)


def test_candidates_with_the_true_ones() -> None:
    tokenizer = WordTokenizer()
    prompts = corpus("short", 32, tokenizer, 1).prompts
    drawn = candidates(1000, tokenizer, 1, include=prompts)
    assert len({p.text for p in drawn}) == 1000
    places = [drawn.index(p) for p in prompts]
    # At random places: not at the front, and in no order.
    assert max(places) > 500
    assert places != sorted(places)
    assert drawn == candidates(1000, tokenizer, 1, include=prompts)


def test_candidates_without_the_true_ones() -> None:
    tokenizer = WordTokenizer()
    first = candidates(200, tokenizer, 5)
    excluded = [Prompt(p.text, ()) for p in first[:50]]
    second = candidates(200, tokenizer, 5, exclude=excluded)
    assert not {p.text for p in excluded} & {p.text for p in second}
    # The same generator otherwise: it is the exclusion that keeps them out.
    assert {p.text for p in first[50:]} <= {p.text for p in second}
    with pytest.raises(ValueError, match="do not fit"):
        candidates(1, tokenizer, 5, include=first[:2])


@pytest.mark.model
def test_lengths_with_the_real_tokenizer() -> None:
    from tee_runner.models import load_model, resolve_model

    tokenizer = load_model(resolve_model("smollm2-135m-instruct")).tokenizer
    made = corpus("short", 512, tokenizer, 1)
    lengths = np.bincount([len(p.tokens) for p in made.prompts], minlength=33)
    assert lengths[:8].sum() == 0
    assert len(lengths) == 33
    # Every length from 8 to 32 is there.
    assert lengths[8:].min() > 0
    long = corpus("long", 3, tokenizer, 1)
    assert [len(p.tokens) for p in long.prompts] == list(LONG_LENGTHS)
    assert len({t for p in made.prompts for t in p.tokens}) > 1000
