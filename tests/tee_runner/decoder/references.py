"""What the decoder tests compare with: float64 norms, transformers' rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float32, Float64

EPSILON = np.float32(1e-5)
THETA = 10_000.0


def normals(*shape: int, seed: int = 1) -> Float32:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rms_norm(rows: np.ndarray, weight: np.ndarray) -> Float64:
    wide = rows.astype(np.float64)
    normed: Float64 = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + float(EPSILON)) * weight
    return normed


def norm_tolerance(d: int) -> float:
    """Relative: a sum of d squares, halved by the root, and four more roundings."""
    return (d / 2 + 4) * SINGLE_ROUNDING


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
