"""Blocked attention against a dense softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.decoder.attention import KEY_BLOCK, attention, attention_parallel, query_block
from tee_runner.decoder.kv_cache import KvDtype
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float32, Float64

DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch: sequence i continues ``pasts[i]`` positions by ``counts[i]`` rows."""

    depth: int = 32
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    pasts: tuple[int, ...] = (0,)
    counts: tuple[int, ...] = (1,)
    dtype: KvDtype = "float32"
    ring: bool = False
    softcap: float = 0.0
    spread: float = 1.0
    seed: int = 1

    @property
    def capacity(self) -> int:
        """Positions a slot holds: all and three more, or what the window and the longest chunk need."""
        if self.ring:
            return -(-(self.window + max(self.counts) - 1) // KEY_BLOCK) * KEY_BLOCK
        return max(map(sum, zip(self.pasts, self.counts, strict=True))) + 3


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One side of a cache, as it is stored, with scales, and as the float64 values it stands for."""

    stored: np.ndarray
    scales: Float32
    exact: Float64


def store(values: Float32, kv_heads: int, dtype: KvDtype) -> Stored:
    """``values`` (..., kv_dim) as the cache holds them; NaN stays NaN where the type has it."""
    none = np.zeros((0, 0, 0), np.float32)
    if dtype == "float32":
        return Stored(stored=values, scales=none, exact=values.astype(np.float64))
    if dtype == "bfloat16":
        narrow = values.astype(ml_dtypes.bfloat16)
        return Stored(stored=narrow.view(np.uint16), scales=none, exact=narrow.astype(np.float64))
    heads = values.reshape(*values.shape[:2], kv_heads, -1)
    scales = np.abs(heads).max(axis=3) / np.float32(127)
    levels = np.rint(np.nan_to_num(heads / scales[..., None])).astype(np.int8)
    exact = levels.astype(np.float64) * scales[..., None].astype(np.float64)
    return Stored(stored=levels.reshape(values.shape), scales=scales, exact=exact.reshape(values.shape))


def run(case: Case) -> None:
    """Compare the serial kernel with the reference, and the parallel one with the serial one."""
    generator = np.random.default_rng(case.seed)
    n, slots = sum(case.counts), len(case.counts)
    kv_dim, capacity = case.kv_heads * case.depth, case.capacity
    scale = case.spread / np.sqrt(case.depth)
    queries = (generator.standard_normal((n, case.heads * case.depth)) * scale).astype(np.float32)
    # Slots in another order than the rows. What lies past a sequence's end, or before the first
    # row's window, must never be read.
    order = generator.permutation(slots)
    sides = []
    for _ in range(2):
        values = np.full((slots, capacity, kv_dim), np.nan, np.float32)
        for slot, past, count in zip(order, case.pasts, case.counts, strict=True):
            visible = np.arange(first_seen(case, past), past + count)
            values[slot, visible % capacity] = generator.standard_normal((len(visible), kv_dim))
        sides.append(store(values, case.kv_heads, case.dtype))
    keys, values = sides
    group, tasks = case.heads // case.kv_heads, tasks_of(case, order)
    serial, parallel = np.full((2, n, case.heads * case.depth), np.nan, np.float32)
    for kernel, out in ((attention, serial), (attention_parallel, parallel)):
        kernel(
            queries, keys.stored, values.stored, keys.scales, values.scales, out, tasks, group,
            case.depth, case.window, np.float32(case.softcap),
        )  # fmt: skip
    np.testing.assert_array_equal(serial, parallel)
    row = 0
    for slot, past, count in zip(order, case.pasts, case.counts, strict=True):
        positions = np.arange(first_seen(case, past), past + count)
        expected, tolerance = dense(
            queries[row : row + count], keys.exact[slot, positions % capacity],
            values.exact[slot, positions % capacity], positions, past, case,
        )  # fmt: skip
        assert (np.abs(serial[row : row + count] - expected) <= tolerance).all()
        row += count


def first_seen(case: Case, past: int) -> int:
    """The oldest position that any row from ``past`` on sees."""
    return max(0, past + 1 - case.window) if case.window else 0


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
    queries: Float32, keys: Float64, values: Float64, positions: np.ndarray, past: int, case: Case
) -> tuple[Float64, Float64]:
    """Attention of one sequence in float64, and how far float32 may stray from it.

    A score is a sum of ``depth`` products, one rounding of a scale and up to three of a soft cap,
    off by δ ≤ (depth + 1)·2⁻²⁴·Σ|q||k| + 4e-7·|cap|; a weight inherits it relatively, twice with the
    normalisation, next to exp's 2e-7 on both sides of the division and on each rescaling by a new
    maximum; the output is a sum of weighted values.
    """
    count, length = len(queries), len(keys)
    q = queries.astype(np.float64).reshape(count, case.heads, case.depth)
    k, v = (np.repeat(
        cache.reshape(length, case.kv_heads, case.depth), case.heads // case.kv_heads, 1
    ) for cache in (keys, values))  # fmt: skip
    scores = np.einsum("ihd,jhd->hij", q, k)
    sizes = np.einsum("ihd,jhd->hij", np.abs(q), np.abs(k))
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    own, other = np.arange(past, past + count)[:, None], positions[None]
    seen = other <= own
    if case.window:
        seen &= other > own - case.window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    delta = (case.depth + 1) * SINGLE_ROUNDING * np.where(seen, sizes, 0.0).max(axis=2) + 4e-7 * case.softcap
    blocks = length // KEY_BLOCK + 2
    relative = 2 * delta + 2e-7 * 2 * blocks + (length + 8) * SINGLE_ROUNDING
    expected = np.einsum("hij,jhd->ihd", weights, v)
    size = np.einsum("hij,jhd->ihd", weights, np.abs(v)) * relative.T[:, :, None]
    return expected.reshape(count, -1), size.reshape(count, -1)


@pytest.mark.parametrize("depth", [16, 32, 64, 66, 80, 96, 128, 256, 450, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(depth: int, dtype: KvDtype) -> None:
    run(Case(depth=depth, pasts=(0, 70), counts=(40, 1), dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (9, 3), (32, 2), (40, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    run(Case(heads=heads, kv_heads=kv_heads, depth=16, pasts=(0, 9, 66), counts=(70, 5, 1)))


@pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65, 100, 1000])
def test_windows(window: int) -> None:
    run(Case(window=window, pasts=(0, 150, 63, 64, 200), counts=(140, 1, 1, 2, 37)))


@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("counts", [(1, 1, 1), (37, 1, 5), (64, 2, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rings(window: int, counts: tuple[int, ...], dtype: KvDtype) -> None:
    # Sequences that have gone round the ring many times, once, and not at all.
    run(Case(window=window, pasts=(1000, 130, 0), counts=counts, ring=True, dtype=dtype))


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_soft_caps(softcap: float, spread: float) -> None:
    run(Case(softcap=softcap, spread=spread, pasts=(0, 90), counts=(70, 1)))
    run(Case(softcap=softcap, spread=spread, pasts=(300,), counts=(30,), window=33, ring=True))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_prefill_and_decode_lengths(length: int) -> None:
    run(Case(pasts=(0,), counts=(length,)))
    run(Case(pasts=(length - 1,), counts=(1,)))


def test_ragged_batch_of_many_sequences() -> None:
    pasts, counts = (0, 17, 64, 0, 128, 3), (1, 1, 33, 90, 1, 2)
    run(Case(pasts=pasts, counts=counts))
    run(Case(pasts=pasts, counts=counts, window=20, dtype="bfloat16"))


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
    ring=st.booleans(),
    sequences=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 70)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch(
    depth: int,
    kv_heads: int,
    group: int,
    window: int,
    ring: bool,
    sequences: list[tuple[int, int]],
    dtype: KvDtype,
    seed: int,
) -> None:
    run(
        Case(
            depth=depth, heads=kv_heads * group, kv_heads=kv_heads, window=window,
            pasts=tuple(past for past, _ in sequences), counts=tuple(count for _, count in sequences),
            dtype=dtype, ring=ring and window > 0, seed=seed,
        )
    )  # fmt: skip


def test_a_query_block_holds_at_least_one_position() -> None:
    for group in range(1, 130):
        assert query_block(group) >= 1
        assert query_block(group) * group <= max(64, group)
