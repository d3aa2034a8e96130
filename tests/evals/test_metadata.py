"""What sizes, counts and times reveal, on planted captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from evals.attacks.drivers.metadata import Metadata, leak
from evals.attacks.model import Capture, CorpusName, Offload, Outcome, PromptTruth, Truth, View

LENGTHS = [5, 7, 9, 12, 15, 20, 24, 24]


def attack(captures: Sequence[Capture], truths: Sequence[PromptTruth], corpus: CorpusName) -> Outcome:
    view = View(
        condition="planted", scheme="planted", parameters={}, corpus=corpus, captures=captures,
        model=cast("Any", None),
    )  # fmt: skip
    return Metadata().run(view, Truth(prompts=truths), np.random.default_rng(3))


def offload(rows: int, forward: int = 0, arrived: int = 0, compute: int = 0) -> Offload:
    return Offload(
        forward=forward, layer=0, op="qkv", operand=np.zeros((rows, 4), dtype=np.float16),
        arrived_ns=arrived, compute_ns=compute,
    )  # fmt: skip


def secret(prompt: int, lengths: Sequence[int], generated: int = 0) -> PromptTruth:
    tokens = tuple(tuple(range(prompt, prompt + n + generated)) for n in lengths)
    return PromptTruth(prompt=prompt, text="", tokens=tokens, prompt_lengths=tuple(lengths), rows={})


def sized(rows: Callable[[int], int]) -> Outcome:
    captures = [Capture(prompt=i, offloads=(offload(rows(n)),)) for i, n in enumerate(LENGTHS)]
    return attack(captures, [secret(i, [n]) for i, n in enumerate(LENGTHS)], "short")


def test_exact_rows_reveal_the_length_and_constant_rows_nothing() -> None:
    exact = sized(lambda n: n + 8)
    assert exact.value == 1.0
    assert exact.details["prompt lengths: revealed, bits"] == pytest.approx(2.75)
    constant = sized(lambda n: 64)
    assert constant.value == constant.chance == 0.25
    assert constant.details["prompt lengths: revealed, bits"] == pytest.approx(0.0)


def test_rounded_rows_reveal_a_bucket() -> None:
    outcome = sized(lambda n: 1 << (n + 7).bit_length())
    # Buckets of 5, 7 | 9, 12, 15, 20, 24, 24: one guess right in the first, two in the second.
    assert outcome.value == pytest.approx(3 / 8)
    assert 0 < outcome.details["prompt lengths: revealed, bits"] < 2.75


def test_leak_of_independent_values_is_chance() -> None:
    result = leak([0, 0, 1, 1], ["a", "b", "a", "b"])
    assert result.recovered == result.guessed == 0.5
    assert result.mutual_bits == pytest.approx(0.0)


def test_decode_reveals_answer_length_and_batch_size() -> None:
    captures, truths = [], []
    for i, batch in enumerate((1, 2, 4)):
        steps = tuple(offload(9 * batch, forward=f) for f in range(1, 6))
        captures.append(Capture(prompt=i, offloads=(offload(30 * batch), *steps)))
        truths.append(secret(i, [22] * batch, generated=6))
    outcome = attack(captures, truths, "decode")
    assert outcome.details["answer length equals passes"] == 1.0
    assert outcome.details["batch size recovered"] == 1.0


@pytest.mark.parametrize(("slower_ns", "told"), [(20_000, True), (0, False)])
def test_timing_tells_prompts_apart_only_if_it_differs(slower_ns: int, told: bool) -> None:
    rng = np.random.default_rng(11)
    captures, truths = [], []
    for i, label in enumerate(rng.permutation(np.repeat([0, 1], 48))):
        taken = rng.normal(100_000, 5_000, 12).astype(int) + slower_ns * int(label)
        arrived = np.cumsum(taken)
        captures.append(
            Capture(
                prompt=i,
                offloads=tuple(
                    offload(32, arrived=int(a), compute=int(c)) for a, c in zip(arrived, taken, strict=True)
                ),
            )
        )
        truths.append(secret(1000 * int(label), [24]))
    outcome = attack(captures, truths, "game")
    assert outcome.interval is not None
    assert (outcome.interval[0] > 0.5) is told
    assert (outcome.interval[0] <= 0.0 <= outcome.interval[1]) is not told


def test_captures_without_times_are_not_applicable() -> None:
    captures = [Capture(prompt=i, offloads=(offload(32),)) for i in range(16)]
    truths = [secret(1000 * (i % 2), [24]) for i in range(16)]
    outcome = attack(captures, truths, "game")
    assert not outcome.applicable
    assert "times" in outcome.reason
