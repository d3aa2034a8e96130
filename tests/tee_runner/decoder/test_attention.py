"""Blocked attention against a dense softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.decoder.attention import KEY_BLOCK, attention, attention_parallel, query_block
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float32, Float64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch: sequence i continues ``pasts[i]`` positions by ``counts[i]`` rows."""

    depth: int = 32
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    pasts: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = (1,)
    bfloat16: bool = False
    spread: float = 1.0
    seed: int = 1


def run(case: Case) -> None:
    """Compare the serial kernel with the reference, and the parallel one with the serial one."""
    generator = np.random.default_rng(case.seed)
    n, slots = sum(case.counts), len(case.counts)
    kv_dim, length = case.kv_heads * case.depth, max(map(sum, zip(case.pasts, case.counts, strict=True)))
    scale = case.spread / np.sqrt(case.depth)
    queries = (generator.standard_normal((n, case.heads * case.depth)) * scale).astype(np.float32)
    # Slots in another order than the rows; what lies past a sequence's end must never be read.
    order = generator.permutation(slots)
    keys, values = np.full((2, slots, length + 3, kv_dim), np.nan, np.float32)
    for slot, past, count in zip(order, case.pasts, case.counts, strict=True):
        keys[slot, : past + count] = generator.standard_normal((past + count, kv_dim))
        values[slot, : past + count] = generator.standard_normal((past + count, kv_dim))
    if case.bfloat16:
        keys, values = (cache.astype(ml_dtypes.bfloat16) for cache in (keys, values))
    stored = [cache.view(np.uint16) if case.bfloat16 else cache for cache in (keys, values)]
    group = case.heads // case.kv_heads
    none = np.zeros((0, 0, 0), np.float32)
    arguments = (queries, *stored, none, none)
    tasks = tasks_of(case, order)
    serial, parallel = np.full((2, n, case.heads * case.depth), np.nan, np.float32)
    attention(*arguments, serial, tasks, group, case.depth, case.window, np.float32(0))
    attention_parallel(*arguments, parallel, tasks, group, case.depth, case.window, np.float32(0))
    np.testing.assert_array_equal(serial, parallel)
    row = 0
    for slot, past, count in zip(order, case.pasts, case.counts, strict=True):
        end = past + count
        expected, tolerance = dense(
            queries[row : row + count], keys[slot, :end], values[slot, :end], past, case
        )
        assert (np.abs(serial[row : row + count] - expected) <= tolerance).all()
        row += count


def tasks_of(case: Case, order: np.ndarray) -> np.ndarray:
    """One task per sequence, query block and kv head."""
    block = query_block(case.heads // case.kv_heads)
    tasks, row = [], 0
    for slot, past, count in zip(order, case.pasts, case.counts, strict=True):
        for first in range(0, count, block):
            size = min(block, count - first)
            tasks += [(slot, row + first, size, past + first, head) for head in range(case.kv_heads)]
        row += count
    return np.array(tasks, np.int64)


def dense(
    queries: Float32, keys: np.ndarray, values: np.ndarray, past: int, case: Case
) -> tuple[Float64, Float64]:
    """Attention of one sequence in float64, and how far float32 may stray from it.

    A score is a sum of ``depth`` products, off by δ ≤ depth·2⁻²⁴·Σ|q||k|; a weight inherits it
    relatively, twice with the normalisation, next to exp's 2e-7 on both sides of the division
    and on each rescaling by a new maximum; the output is a sum of weighted values.
    """
    count, length = len(queries), len(keys)
    q = queries.astype(np.float64).reshape(count, case.heads, case.depth)
    k, v = (np.repeat(
        cache.astype(np.float64).reshape(length, case.kv_heads, case.depth), case.heads // case.kv_heads, 1
    ) for cache in (keys, values))  # fmt: skip
    scores = np.einsum("ihd,jhd->hij", q, k)
    sizes = np.einsum("ihd,jhd->hij", np.abs(q), np.abs(k))
    own, other = np.arange(past, past + count)[:, None], np.arange(length)[None]
    seen = other <= own
    if case.window:
        seen &= other > own - case.window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    delta = case.depth * SINGLE_ROUNDING * np.where(seen, sizes, 0.0).max(axis=2)
    blocks = length // KEY_BLOCK + 2
    relative = 2 * delta + 2e-7 * 2 * blocks + (length + 8) * SINGLE_ROUNDING
    expected = np.einsum("hij,jhd->ihd", weights, v)
    size = np.einsum("hij,jhd->ihd", weights, np.abs(v)) * relative.T[:, :, None]
    return expected.reshape(count, -1), size.reshape(count, -1)


@pytest.mark.parametrize("depth", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_head_sizes(depth: int, bfloat16: bool) -> None:
    run(Case(depth=depth, pasts=(0, 70), counts=(40, 1), bfloat16=bfloat16))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (9, 3), (32, 2), (40, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    run(Case(heads=heads, kv_heads=kv_heads, depth=16, pasts=(0, 9, 66), counts=(70, 5, 1)))


@pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65, 100, 1000])
def test_windows(window: int) -> None:
    run(Case(window=window, pasts=(0, 150, 63, 64, 200), counts=(140, 1, 1, 2, 37)))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_prefill_and_decode_lengths(length: int) -> None:
    run(Case(pasts=(0,), counts=(length,)))
    run(Case(pasts=(length - 1,), counts=(1,)))


def test_ragged_batch_of_many_sequences() -> None:
    pasts, counts = (0, 17, 64, 0, 128, 3), (1, 1, 33, 90, 1, 2)
    run(Case(pasts=pasts, counts=counts))
    run(Case(pasts=pasts, counts=counts, window=20, bfloat16=True))


@pytest.mark.parametrize("spread", [0.0, 8.0, 30.0])
def test_flat_and_peaked_weights(spread: float) -> None:
    # Scores up to a hundred apart: later blocks must rescale what earlier ones summed.
    run(Case(spread=spread, pasts=(0, 130), counts=(100, 3)))


@settings(max_examples=40, deadline=None)
@given(
    depth=st.sampled_from([16, 24, 48, 64, 80]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    window=st.sampled_from([0, 0, 1, 7, 64, 90]),
    sequences=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 70)), min_size=1, max_size=4),
    bfloat16=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch(
    depth: int,
    kv_heads: int,
    group: int,
    window: int,
    sequences: list[tuple[int, int]],
    bfloat16: bool,
    seed: int,
) -> None:
    run(
        Case(
            depth=depth, heads=kv_heads * group, kv_heads=kv_heads, window=window,
            pasts=tuple(past for past, _ in sequences), counts=tuple(count for _, count in sequences),
            bfloat16=bfloat16, seed=seed,
        )
    )  # fmt: skip


def test_a_query_block_holds_at_least_one_position() -> None:
    for group in range(1, 130):
        assert query_block(group) >= 1
        assert query_block(group) * group <= max(64, group)
