"""Splitting, rotating and storing queries, keys and values, against float64 and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tee_runner.decoder import kernels
from tee_runner.decoder.config import RopeConfig
from tee_runner.decoder.rope import inverse_frequencies, rope_tables
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float32, Float64

from .references import EPSILON, THETA, hf_rotary, norm_tolerance, normals, rms_norm

SLOTS = np.array([2, 2, 2, 0, 1, 1], np.int64)
POSITIONS = np.array([0, 1, 2, 63, 30, 31], np.int64)


def split_and_rotate(
    qkv: Float32, heads: int, kv_heads: int, depth: int, positions: np.ndarray, norms: tuple[Any, Any]
) -> tuple[Float64, Float64, Float64]:
    """Queries (unscaled), keys and values ``(n, heads·depth)`` in float64."""
    wide = qkv.astype(np.float64)
    q, k, v = np.split(wide, [heads * depth, (heads + kv_heads) * depth], axis=1)
    angles = np.outer(positions, inverse_frequencies(RopeConfig(theta=THETA), depth))[:, None]
    turned = []
    for part, weight in ((q, norms[0]), (k, norms[1])):
        split = part.reshape(len(part), -1, depth)
        if weight is not None:
            split = rms_norm(split, weight)
        a, b = split[..., : depth // 2], split[..., depth // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        turned.append(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(part.shape))
    return turned[0], turned[1], v


@dataclass(frozen=True, kw_only=True)
class Appended:
    """What :func:`qkv_to_cache` wrote; untouched places of the cache hold 7."""

    queries: Float32
    keys: np.ndarray
    values: np.ndarray
    key_scales: Float32
    value_scales: Float32


def qkv_to_cache(
    qkv: Float32, heads: int, kv_heads: int, depth: int, slots: np.ndarray, positions: np.ndarray,
    norms: tuple[Any, ...], scale: float, dtype: Any, capacity: int = 64,
) -> Appended:  # fmt: skip
    """Run the kernel with ``norms`` of queries, keys and (where given) values; None for none."""
    cosines, sines = rope_tables(RopeConfig(theta=THETA), depth, int(positions.max()) + 1)
    queries = np.full((len(qkv), heads * depth), np.nan, np.float32)
    keys, values = np.full((2, 3, capacity, kv_heads * depth), 7, dtype)
    key_scales, value_scales = np.full((2, 3, capacity, kv_heads), 7, np.float32)
    empty = np.empty(0, np.float32)
    q_norm, k_norm, v_norm = (empty if norm is None else norm for norm in (*norms, None)[:3])
    kernels.qkv_to_cache(
        qkv.copy(), queries, keys, values, key_scales, value_scales, slots, positions, cosines, sines,
        q_norm, k_norm, v_norm, EPSILON, np.float32(scale),
    )  # fmt: skip
    return Appended(
        queries=queries, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales
    )


@pytest.mark.parametrize("depth", [16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_to_cache(depth: int, heads: int, kv_heads: int, normed: bool) -> None:
    qkv = normals(len(SLOTS), (heads + 2 * kv_heads) * depth)
    norms = (normals(depth, seed=2), normals(depth, seed=3)) if normed else (None, None)
    made = qkv_to_cache(qkv, heads, kv_heads, depth, SLOTS, POSITIONS, norms, 0.125, np.float32)
    q, k, v = split_and_rotate(qkv, heads, kv_heads, depth, POSITIONS, norms)

    assert (np.abs(made.queries / 0.125 - q) <= rotation_tolerance(q, depth)).all()
    assert (np.abs(made.keys[SLOTS, POSITIONS] - k) <= rotation_tolerance(k, depth)).all()
    np.testing.assert_array_equal(made.values[SLOTS, POSITIONS], v)
    for cache in (made.keys, made.values):
        written = np.zeros(cache.shape[:2], bool)
        written[SLOTS, POSITIONS] = True
        assert (cache[~written] == 7).all()


def rotation_tolerance(turned: Float64, depth: int) -> Float64:
    """A rotation is two products and a sum of magnitudes up to the pair's norm."""
    pairs = turned.reshape(len(turned), -1, 2, depth // 2)
    size = np.broadcast_to(np.linalg.norm(pairs, axis=2, keepdims=True), pairs.shape)
    tolerance: Float64 = (4 * SINGLE_ROUNDING + norm_tolerance(depth)) * size.reshape(turned.shape)
    return tolerance


def test_keys_that_are_values() -> None:
    depth, heads, kv_heads = 32, 4, 2
    qk = normals(len(SLOTS), (heads + kv_heads) * depth)
    norms = (normals(depth, seed=2), normals(depth, seed=3), np.ones(depth, np.float32))
    made = qkv_to_cache(qk, heads, kv_heads, depth, SLOTS, POSITIONS, norms, 1.0, np.float32)
    raw = qk[:, heads * depth :]
    q, k, _ = split_and_rotate(
        np.concatenate([qk, raw], axis=1), heads, kv_heads, depth, POSITIONS, norms[:2]
    )
    # Values are the projection before the key norm and the rotation, with their own norm.
    v = rms_norm(raw.reshape(len(raw), kv_heads, depth), np.ones(depth)).reshape(raw.shape)
    assert (np.abs(made.queries - q) <= rotation_tolerance(q, depth)).all()
    assert (np.abs(made.keys[SLOTS, POSITIONS] - k) <= rotation_tolerance(k, depth)).all()
    np.testing.assert_allclose(made.values[SLOTS, POSITIONS], v, rtol=norm_tolerance(depth))


def test_value_norm() -> None:
    qkv = normals(len(SLOTS), 8 * 16) * np.float32(5.0)
    norms = (None, None, np.ones(16, np.float32))
    made = qkv_to_cache(qkv, 4, 2, 16, SLOTS, POSITIONS, norms, 1.0, np.float32)
    raw = qkv[:, 6 * 16 :].reshape(len(qkv), 2, 16)
    expected = rms_norm(raw, np.ones(16)).reshape(len(qkv), 32)
    np.testing.assert_allclose(made.values[SLOTS, POSITIONS], expected, rtol=norm_tolerance(16))


def test_a_layer_with_queries_only_appends_nothing() -> None:
    q = normals(len(SLOTS), 4 * 32)
    made = qkv_to_cache(q, 4, 2, 32, SLOTS, POSITIONS, (None, None), 1.0, np.float32)
    zeros = np.zeros((len(SLOTS), 4 * 32), np.float32)
    whole = qkv_to_cache(
        np.concatenate([q, zeros], axis=1), 4, 2, 32, SLOTS, POSITIONS, (None, None), 1.0, np.float32
    )
    np.testing.assert_array_equal(made.queries, whole.queries)
    for kept in (made.keys, made.values, made.key_scales, made.value_scales):
        assert (kept == 7).all()


def test_positions_go_round_a_ring() -> None:
    positions = np.array([0, 15, 16, 31, 100, 1000], np.int64)
    slots = np.array([0, 0, 1, 2, 1, 2], np.int64)
    qkv = normals(len(slots), 3 * 16)
    arguments = (qkv, 1, 1, 16, slots, positions, (None, None), 1.0, np.float32)
    ring, full = qkv_to_cache(*arguments, capacity=16), qkv_to_cache(*arguments, capacity=1001)
    for kept, whole in ((ring.keys, full.keys), (ring.values, full.values)):
        np.testing.assert_array_equal(kept[slots, positions % 16], whole[slots, positions])
    assert (ring.keys != 7).any(axis=2).sum() == len(slots)


def test_rotation_is_that_of_transformers() -> None:
    depth, heads = 64, 4
    qkv = normals(len(SLOTS), 3 * heads * depth)
    made = qkv_to_cache(qkv, heads, heads, depth, SLOTS, POSITIONS, (None, None), 1.0, np.float32)
    _, cosines, sines = hf_rotary({"rope_type": "default", "rope_theta": THETA}, depth, 64)
    cos, sin = (torch.from_numpy(np.tile(table[POSITIONS], 2)) for table in (cosines, sines))
    split = torch.from_numpy(qkv).reshape(len(SLOTS), 3, heads, depth)
    # (batch, heads, positions, depth), every row at its own position.
    q, k = (split[:, part].transpose(0, 1)[None] for part in (0, 1))
    turned = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    # Their angle, at most 63, is off by up to 22 roundings of itself (see the tables).
    for ours, theirs in zip((made.queries, made.keys[SLOTS, POSITIONS]), turned, strict=True):
        found = ours.reshape(len(SLOTS), heads, depth)
        np.testing.assert_allclose(
            found, theirs[0].transpose(0, 1).numpy(), atol=63 * 22 * SINGLE_ROUNDING * np.abs(qkv).max()
        )


def rounded(values: Float32) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def test_bfloat16_cache_holds_the_rounded_float32_cache() -> None:
    qkv = normals(len(SLOTS), 8 * 32)
    norms = (normals(32, seed=2), normals(32, seed=3))
    wide = qkv_to_cache(qkv, 4, 2, 32, SLOTS, POSITIONS, norms, 0.5, np.float32)
    narrow = qkv_to_cache(qkv, 4, 2, 32, SLOTS, POSITIONS, norms, 0.5, np.uint16)
    np.testing.assert_array_equal(narrow.queries, wide.queries)
    for ours, exact in ((narrow.keys, wide.keys), (narrow.values, wide.values)):
        np.testing.assert_array_equal(ours[SLOTS, POSITIONS], rounded(exact[SLOTS, POSITIONS]))


def test_int8_cache_holds_the_quantised_float32_cache() -> None:
    qkv = normals(len(SLOTS), 8 * 32)
    qkv[1, 6 * 32 : 7 * 32] = 0.0  # a value head that is zero
    qkv[2, 7 * 32 :] = np.float32(1e-42)  # and one too small to be divided by
    norms = (normals(32, seed=2), normals(32, seed=3))
    wide = qkv_to_cache(qkv, 4, 2, 32, SLOTS, POSITIONS, norms, 0.5, np.float32)
    narrow = qkv_to_cache(qkv, 4, 2, 32, SLOTS, POSITIONS, norms, 0.5, np.int8)
    np.testing.assert_array_equal(narrow.queries, wide.queries)
    for levels, scales, exact in (
        (narrow.keys, narrow.key_scales, wide.keys), (narrow.values, narrow.value_scales, wide.values),
    ):  # fmt: skip
        heads = exact[SLOTS, POSITIONS].reshape(len(SLOTS), 2, 32).astype(np.float64)
        found = levels[SLOTS, POSITIONS].reshape(heads.shape).astype(np.float64)
        step = scales[SLOTS, POSITIONS][..., None].astype(np.float64)
        largest = np.abs(heads).max(axis=2, keepdims=True)
        np.testing.assert_allclose(step, largest / 127, rtol=SINGLE_ROUNDING, atol=1e-44)
        # Half a step, and three roundings of up to 127 of them.
        assert (np.abs(found * step - heads) <= step * (0.5 + 3 * 127 * SINGLE_ROUNDING) + 2e-42).all()
        assert (np.abs(found).max(axis=2) == 127)[largest[..., 0] > 1e-30].all()
        for cache, untouched in ((levels, 7), (scales, 7)):
            written = np.zeros(cache.shape[:2], bool)
            written[SLOTS, POSITIONS] = True
            assert (cache[~written] == untouched).all()


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
def test_bfloat16_rounds_to_nearest_even(bits: list[int]) -> None:
    raw = np.array(bits, np.uint32)
    raw[(raw & 0x7F800000) == 0x7F800000] = 0x7F800000  # infinity for what is not finite
    # The value as it is, on the tie, and just beside it.
    cases = np.concatenate(
        [raw, raw & 0xFFFF0000 | 0x8000, raw & 0xFFFF0000 | 0x7FFF, raw & 0xFFFF0000 | 0x8001]
    )
    cases = cases[(cases & 0x7F800000 != 0x7F800000) | (cases & 0x7FFFFF == 0)].astype(np.uint32)
    for start in range(0, len(cases) - 15, 16):
        value = cases[start : start + 16].view(np.float32)
        qkv = np.concatenate([np.zeros(32, np.float32), value])[None]
        made = qkv_to_cache(qkv, 1, 1, 16, np.array([1]), np.array([3]), (None, None), 1.0, np.uint16)
        np.testing.assert_array_equal(made.values[1, 3], rounded(value))
