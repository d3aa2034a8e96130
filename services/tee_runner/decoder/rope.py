"""Rotary position embedding: frequencies and tables."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """``(head_dim / 2,)`` float64 angles per position, scaling applied."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: NDArray[np.float64], scaling: Llama3RopeScaling) -> NDArray[np.float64]:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, a ramp between."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return frequencies * (ramp + (1.0 - ramp) / scaling.factor)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines ``(positions, head_dim / 2)`` float32."""
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse_frequencies(rope, head_dim))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
