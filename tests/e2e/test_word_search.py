"""Each detector of plaintext in operands of words on its own, and that honest operands pass them all."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from .recording import Offload, Operand, Recording, Secrets, leaks
from .word_search import (
    cosine_bound,
    outside_share,
    quantised,
    shared_blinding,
    signed,
    small_words_bound,
    unblinded,
)

RNG = np.random.default_rng(11)
N, D, VOCAB = 5, 576, 4096
Words = NDArray[np.uint32]


def uniform(*shape: int) -> Words:
    return RNG.integers(0, 1 << 32, shape, dtype=np.uint32)


def plain(rows: NDArray[np.float32], bits: int = 12) -> Words:
    """Quantised rows as they would go on the wire without a blinding."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    return np.rint(rows / largest * (2 ** (bits - 1) - 1)).astype(np.int32).view(np.uint32)


def blinded() -> tuple[Recording, Secrets]:
    """Two honest offloads, and an honest result of the LM head."""
    offloads = [Offload("w", RNG.standard_normal((N, D)).astype(np.float32)) for _ in range(2)]
    secrets = Secrets(
        prompt="a secret question", answer="an answer", tokens=[311, 4097, 12], offloads=offloads,
        logits=[RNG.standard_normal(VOCAB).astype(np.float32)],
    )  # fmt: skip
    operands = [Operand("w", plain(offload.rows) + uniform(N, D)) for offload in offloads]
    return Recording(operands, [("message", RNG.bytes(5000))], [uniform(1, VOCAB)]), secrets


def test_honest_operands_are_clean() -> None:
    for _ in range(5):
        assert leaks(*blinded()) == []


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_a_row_without_blinding_is_found(bits: int) -> None:
    recording, secrets = blinded()
    rows = recording.operands[1].rows.copy()
    rows[2] = plain(secrets.offloads[1].rows, bits)[2]
    recording.operands[1] = Operand("w", rows)
    found = leaks(recording, secrets)
    assert "offload 1 (w): a row is parallel to a plaintext row" in found
    assert "offload 1 (w): a row has words that are not blinded" in found
    assert "offload 1 (w): it lies in the span of the plaintext rows" not in found
    assert ("operand of w: an activation row as integers" in found) == (bits >= 10)


def test_an_offload_without_blinding_is_found() -> None:
    recording, secrets = blinded()
    mixed = RNG.integers(-9, 10, (N, N)) @ plain(secrets.offloads[0].rows).view(np.int32)
    for rows in (plain(secrets.offloads[0].rows), mixed.astype(np.uint32)):
        recording.operands[0] = Operand("w", rows)
        assert "offload 0 (w): it lies in the span of the plaintext rows" in leaks(recording, secrets)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_blinding_that_misses_words_is_found(share: float) -> None:
    """As one that is too sparse would: the direction is random then, the missed words are not."""
    recording, secrets = blinded()
    rows = recording.operands[0].rows.copy()
    missed = RNG.random((N, D)) < share
    rows[missed] = plain(secrets.offloads[0].rows)[missed]
    recording.operands[0] = Operand("w", rows)
    assert "offload 0 (w): a row has words that are not blinded" in leaks(recording, secrets)


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_a_blinding_used_twice_is_found(share: float) -> None:
    """In two offloads, in another row, in most places only."""
    recording, secrets = blinded()
    rows = recording.operands[1].rows.copy()
    blinding = recording.operands[0].rows[4] - plain(secrets.offloads[0].rows)[4]
    again = RNG.random(D) < share
    rows[1, again] = (blinding + plain(secrets.offloads[1].rows)[1])[again]
    recording.operands[1] = Operand("w", rows)
    assert leaks(recording, secrets) == ["operands: 1 pairs of rows share their blinding"]


def test_operands_of_other_widths_are_not_compared() -> None:
    one = uniform(3, 600)
    assert shared_blinding([one, one[:, :590].copy(), uniform(3, 2)]) == 0
    assert shared_blinding([one, one + np.uint32(5)]) == 3


def test_a_result_without_blinding_is_found() -> None:
    """Each column has a scale of its own, which the worker's integers lack."""
    recording, secrets = blinded()
    scales = RNG.uniform(0.5, 2.0, VOCAB)
    integers = np.rint(1e5 * secrets.logits[0] / scales).astype(np.int32)
    recording.head_results = [integers.view(np.uint32)[None]]
    assert "result 0 of lm_head: parallel to a logits row" in leaks(recording, secrets)


def test_integers_are_found_at_any_byte() -> None:
    recording, secrets = blinded()
    data = plain(secrets.offloads[0].rows)[3].tobytes()
    recording.received = [("message", RNG.bytes(3) + data + RNG.bytes(9))]
    assert leaks(recording, secrets) == ["message: an activation row as integers"]


def test_bounds_hold_where_chance_can_be_seen() -> None:
    assert 0.3 < cosine_bound(1536) < cosine_bound(576) < 0.7
    assert cosine_bound(16) == 1.0
    rows = uniform(4000, D)
    values = signed(rows).astype(np.float64)
    direction = RNG.standard_normal(D)
    cosines = np.abs(values @ direction) / np.linalg.norm(values, axis=1) / np.linalg.norm(direction)
    assert 0.1 < cosines.max() < cosine_bound(D)
    assert outside_share(D - 238, D) == 0.0
    inside = values[:, :300]  # as good as any subspace of 300 dimensions
    shares = 1 - np.square(inside).sum(axis=1) / np.square(values).sum(axis=1)
    assert outside_share(300, D) < shares.min() < 1 - 300 / D
    assert 3 <= small_words_bound(D) < 10
    assert list(unblinded(rows)) == []


def test_quantised_rows_are_of_every_width() -> None:
    row = np.array([0.5, -2.0, 1.0], np.float32)
    assert [int(np.abs(values).max()) for values in quantised(row)] == [2**b - 1 for b in range(9, 16)]
    assert list(quantised(np.zeros(3, np.float32))) == []
