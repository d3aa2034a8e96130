"""Norms, SwiGLU, RoPE and cache writes against float64 and against transformers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tee_runner.decoder import kernels
from tee_runner.decoder.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from tee_runner.decoder.rope import inverse_frequencies, rope_tables
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float32, Float64

EPSILON = np.float32(1e-5)
THETA = 10_000.0
NO_SCALES = np.zeros((0, 0, 0), np.float32)


def normals(*shape: int, seed: int = 1) -> Float32:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rms_norm(rows: np.ndarray, weight: np.ndarray) -> Float64:
    wide = rows.astype(np.float64)
    normed: Float64 = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + float(EPSILON)) * weight
    return normed


def norm_tolerance(d: int) -> float:
    """Relative: a sum of d squares, halved by the root, and four more roundings."""
    return (d / 2 + 4) * SINGLE_ROUNDING


@pytest.mark.parametrize("n", [1, 15, 16, 40])
@pytest.mark.parametrize("d", [1, 16, 100, 576, 2560])
def test_rms_norm(n: int, d: int) -> None:
    rows, weight = normals(n, d) * np.float32(30.0), normals(d, seed=2)
    out = np.empty_like(rows)
    kernels.rms_norm(rows, weight, EPSILON, out)
    np.testing.assert_allclose(out, rms_norm(rows, weight), rtol=norm_tolerance(d), atol=0)
    theirs = LlamaRMSNorm(d, eps=float(EPSILON))
    theirs.weight.data = torch.from_numpy(weight)
    np.testing.assert_allclose(
        out, theirs(torch.from_numpy(rows)).detach().numpy(), rtol=2 * norm_tolerance(d), atol=0
    )


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_rms_norm_of_small_and_large_rows(size: float) -> None:
    rows = normals(4, 64) * np.float32(size)
    rows[2] = 0.0
    out = np.empty_like(rows)
    kernels.rms_norm(rows, np.ones(64, np.float32), EPSILON, out)
    np.testing.assert_allclose(out, rms_norm(rows, np.ones(64)), rtol=norm_tolerance(64), atol=0)
    assert not out[2].any()


@pytest.mark.parametrize("d", [16, 100, 576])
def test_add_and_norm_keeps_the_residual(d: int) -> None:
    rows, delta, weight = normals(20, d), normals(20, d, seed=2), normals(d, seed=3)
    expected = rows + delta  # one float32 addition: the same bits
    out = np.empty_like(rows)
    kernels.add_and_norm(rows, delta, weight, EPSILON, out)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(out, rms_norm(expected, weight), rtol=norm_tolerance(d), atol=0)


def test_add_bias() -> None:
    rows, bias = normals(5, 37), normals(37, seed=2)
    expected = rows + bias
    kernels.add_bias(rows, bias)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("d", [1, 48, 1536])
def test_swiglu(n: int, d: int) -> None:
    gate_up = normals(n, 2 * d) * np.float32(6.0)
    serial, parallel = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    kernels.swiglu(gate_up, serial)
    kernels.swiglu_parallel(gate_up, parallel)
    gate, up = gate_up[:, :d].astype(np.float64), gate_up[:, d:].astype(np.float64)
    # exp at 2e-7 (3.4 roundings) and an addition, a division and a product.
    np.testing.assert_allclose(serial, gate / (1 + np.exp(-gate)) * up, rtol=7 * SINGLE_ROUNDING, atol=0)
    np.testing.assert_array_equal(serial, parallel)
    theirs = torch.nn.functional.silu(torch.from_numpy(gate_up[:, :d])) * torch.from_numpy(gate_up[:, d:])
    np.testing.assert_allclose(serial, theirs.numpy(), rtol=14 * SINGLE_ROUNDING, atol=0)


def test_swiglu_saturates() -> None:
    gates = np.array([-1e30, -500.0, -89.0, 0.0, 89.0, 500.0, 1e30], np.float32)
    gate_up = np.concatenate([gates, np.ones(7, np.float32)])[None]
    out = np.empty((1, 7), np.float32)
    kernels.swiglu(gate_up, out)
    np.testing.assert_array_equal(out[0, 3:], gates[3:])
    # Below -88 the sigmoid stays at e⁻⁸⁸, about 6e-39, instead of vanishing.
    assert (np.abs(out[0, :3]) <= np.abs(gates[:3]) * 7e-39).all()


def hf_rotary(parameters: dict[str, Any], head_dim: int, positions: int) -> tuple[Float32, Float32, Float32]:
    """Frequencies, cosines and sines as transformers computes them, in float32."""
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters,
        max_position_embeddings=positions,
    )  # fmt: skip
    rotary = LlamaRotaryEmbedding(config)
    cosines, sines = rotary(torch.zeros(1, positions, head_dim), torch.arange(positions)[None])
    half = head_dim // 2
    return rotary.inv_freq.numpy(), cosines[0, :, :half].numpy(), sines[0, :, :half].numpy()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearRopeScaling(factor=4.0),
        Llama3RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        Llama3RopeScaling(
            factor=32.0, low_freq_factor=0.5, high_freq_factor=6.0, original_max_position_embeddings=256
        ),
    ],
)
def test_rope_tables_are_those_of_transformers(
    head_dim: int, theta: float, scaling: LinearRopeScaling | Llama3RopeScaling | None
) -> None:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, LinearRopeScaling):
        parameters |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        parameters |= {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in names}
    rope, positions = RopeConfig(theta=theta, scaling=scaling), 1500
    frequencies, cosines, sines = hf_rotary(parameters, head_dim, positions)
    ours = inverse_frequencies(rope, head_dim)
    # A float32 power of theta: its exponent's rounding is multiplied by ln theta, at most 13.8.
    relative = (13.8 + 8) * SINGLE_ROUNDING
    np.testing.assert_allclose(ours, frequencies, rtol=relative)
    # Their float32 angle inherits that error; the tables themselves are rounded once on each side.
    own_cosines, own_sines = rope_tables(rope, head_dim, positions)
    angles = np.outer(np.arange(positions), ours)
    tolerance = angles * relative + 4 * SINGLE_ROUNDING
    assert (np.abs(own_cosines - cosines) <= tolerance).all()
    assert (np.abs(own_sines - sines) <= tolerance).all()
    # Against float64, one rounding.
    np.testing.assert_allclose(own_cosines, np.cos(angles), atol=SINGLE_ROUNDING)
    np.testing.assert_allclose(own_sines, np.sin(angles), atol=SINGLE_ROUNDING)


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


def qkv_to_cache(
    qkv: Float32, heads: int, kv_heads: int, depth: int, slots: np.ndarray, positions: np.ndarray,
    norms: tuple[Any, Any], scale: float, dtype: Any,
) -> tuple[Float32, np.ndarray, np.ndarray]:  # fmt: skip
    cosines, sines = rope_tables(RopeConfig(theta=THETA), depth, 64)
    queries = np.full((len(qkv), heads * depth), np.nan, np.float32)
    keys, values = np.full((2, 3, 64, kv_heads * depth), 7, dtype)
    empty = np.empty(0, np.float32)
    q_norm, k_norm = (empty if norm is None else norm for norm in norms)
    kernels.qkv_to_cache(
        qkv.copy(), queries, keys, values, NO_SCALES, NO_SCALES, slots, positions, cosines, sines, q_norm,
        k_norm, empty, EPSILON, np.float32(scale),
    )  # fmt: skip
    return queries, keys, values


SLOTS = np.array([2, 2, 2, 0, 1, 1], np.int64)
POSITIONS = np.array([0, 1, 2, 63, 30, 31], np.int64)


@pytest.mark.parametrize("depth", [16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_to_cache(depth: int, heads: int, kv_heads: int, normed: bool) -> None:
    qkv = normals(len(SLOTS), (heads + 2 * kv_heads) * depth)
    norms = (normals(depth, seed=2), normals(depth, seed=3)) if normed else (None, None)
    queries, keys, values = qkv_to_cache(
        qkv, heads, kv_heads, depth, SLOTS, POSITIONS, norms, 0.125, np.float32
    )
    q, k, v = split_and_rotate(qkv, heads, kv_heads, depth, POSITIONS, norms)

    # A rotation is two products and a sum of magnitudes up to the pair's norm.
    def tolerance(turned: Float64) -> Float64:
        pairs = turned.reshape(len(turned), -1, 2, depth // 2)
        size = np.broadcast_to(np.linalg.norm(pairs, axis=2, keepdims=True), pairs.shape)
        return (4 * SINGLE_ROUNDING + norm_tolerance(depth)) * size.reshape(turned.shape)

    assert (np.abs(queries / 0.125 - q) <= tolerance(q)).all()
    assert (np.abs(keys[SLOTS, POSITIONS] - k) <= tolerance(k)).all()
    np.testing.assert_array_equal(values[SLOTS, POSITIONS], v)
    for cache in (keys, values):
        written = np.zeros(cache.shape[:2], bool)
        written[SLOTS, POSITIONS] = True
        assert (cache[~written] == 7).all()


def test_rotation_is_that_of_transformers() -> None:
    depth, heads = 64, 4
    qkv = normals(len(SLOTS), 3 * heads * depth)
    queries, keys, _ = qkv_to_cache(qkv, heads, heads, depth, SLOTS, POSITIONS, (None, None), 1.0, np.float32)
    _, cosines, sines = hf_rotary({"rope_type": "default", "rope_theta": THETA}, depth, 64)
    cos, sin = (torch.from_numpy(np.tile(table[POSITIONS], 2)) for table in (cosines, sines))
    split = torch.from_numpy(qkv).reshape(len(SLOTS), 3, heads, depth)
    # (batch, heads, positions, depth), every row at its own position.
    q, k = (split[:, part].transpose(0, 1)[None] for part in (0, 1))
    turned = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    # Their angle, at most 63, is off by up to 22 roundings of itself (see the tables).
    for ours, theirs in zip((queries, keys[SLOTS, POSITIONS]), turned, strict=True):
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
    np.testing.assert_array_equal(narrow[0], wide[0])
    for ours, exact in zip(narrow[1:], wide[1:], strict=True):
        np.testing.assert_array_equal(ours[SLOTS, POSITIONS], rounded(exact[SLOTS, POSITIONS]))


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
        _, _, values = qkv_to_cache(qkv, 1, 1, 16, np.array([1]), np.array([3]), (None, None), 1.0, np.uint16)
        np.testing.assert_array_equal(values[1, 3], rounded(value))
