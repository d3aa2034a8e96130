"""Families without QK-norm get the same bytes as from a kernel in which there is no such norm."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from tee_runner.decoder import kernels
from tee_runner.decoder.config import RopeConfig, YarnRopeScaling
from tee_runner.decoder.rope import rope_tables

EMPTY = np.empty(0, np.float32)
YARN = YarnRopeScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=1.1386294)


@numba.njit
def split_and_rotate(
    qkv: Any, queries: Any, keys: Any, values: Any, positions: Any, cosines: Any, sines: Any, scale: Any
) -> None:
    """``qkv_to_cache`` for one sequence and float32 caches, with nothing but the rotation."""
    half = cosines.shape[1]
    depth, q_dim, kv_dim = 2 * half, queries.shape[1], keys.shape[1]
    for i in range(qkv.shape[0]):
        p = positions[i]
        for start in range(0, q_dim + kv_dim, depth):
            query = start < q_dim
            factor = scale if query else np.float32(1.0)
            for c in range(half):
                a, b = qkv[i, start + c], qkv[i, start + half + c]
                first = (a * cosines[p, c] - b * sines[p, c]) * factor
                second = (b * cosines[p, c] + a * sines[p, c]) * factor
                if query:
                    queries[i, start + c], queries[i, start + half + c] = first, second
                else:
                    keys[p, start - q_dim + c], keys[p, start - q_dim + half + c] = first, second
        for c in range(kv_dim):
            values[p, c] = qkv[i, q_dim + kv_dim + c]


@pytest.mark.parametrize("rope", [RopeConfig(theta=1e4), RopeConfig(theta=1e6, scaling=YARN)])
def test_bytes_are_those_of_a_kernel_without_norms(rope: RopeConfig) -> None:
    heads, kv_heads, depth, rows, capacity = 6, 2, 40, 17, 64
    rng = np.random.default_rng(4)
    qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * depth), np.float32)
    positions = np.arange(5, 5 + rows, dtype=np.int64)
    cosines, sines = rope_tables(rope, depth, capacity)
    scale = np.float32(depth**-0.5)

    expected = [np.zeros((n, d * depth), np.float32) for n, d in ((rows, heads), *[(capacity, kv_heads)] * 2)]
    split_and_rotate(qkv, *expected, positions, cosines, sines, scale)

    queries = np.zeros((rows, heads * depth), np.float32)
    keys, values = (np.zeros((1, capacity, kv_heads * depth), np.float32) for _ in range(2))
    scales = np.empty((0, 0, 0), np.float32)
    # An epsilon that would show in everything it touched.
    kernels.qkv_to_cache(
        qkv.copy(), queries, keys, values, scales, scales, np.zeros(rows, np.int64), positions,
        cosines, sines, EMPTY, EMPTY, EMPTY, np.float32(np.nan), scale,
    )  # fmt: skip
    for ours, reference in zip((queries, keys[0], values[0]), expected, strict=True):
        assert reference.any()
        assert ours.tobytes() == reference.tobytes()
