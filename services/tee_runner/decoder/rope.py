"""Rotary position embedding: frequencies and tables."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ProportionalRope,
    RopeConfig,
    YarnRopeScaling,
)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """``(head_dim / 2,)`` float64 angles per position, scaling applied."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, YarnRopeScaling):
        return _yarn(frequencies, scaling, rope.theta)
    if isinstance(scaling, ProportionalRope):
        turning = int(scaling.partial_rotary_factor * head_dim // 2)
        return np.where(np.arange(len(frequencies)) < turning, frequencies / scaling.factor, 0.0)
    return frequencies


def _llama3(frequencies: NDArray[np.float64], scaling: Llama3RopeScaling) -> NDArray[np.float64]:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, a ramp between."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return frequencies * (ramp + (1.0 - ramp) / scaling.factor)


def _yarn(frequencies: NDArray[np.float64], scaling: YarnRopeScaling, theta: float) -> NDArray[np.float64]:
    """YaRN: fast angles kept, slow ones divided by ``factor``, a linear ramp over the index between."""
    half = len(frequencies)
    low, high = (
        _angle_turning(turns, scaling, theta, half) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, 2.0 * half - 1.0)
    if low == high:
        high += 1e-3  # as the reference does, against a division by zero
    slow = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
    scaled: NDArray[np.float64] = frequencies * (1.0 - slow + slow / scaling.factor)
    return scaled


def _angle_turning(turns: float, scaling: YarnRopeScaling, theta: float, half: int) -> float:
    """The (fractional) index of the angle that turns ``turns`` times within the original context."""
    return (
        half * math.log(scaling.original_max_position_embeddings / (turns * 2.0 * math.pi)) / math.log(theta)
    )


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines ``(positions, head_dim / 2)`` float32, YaRN's attention factor applied."""
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse_frequencies(rope, head_dim))
    cosines, sines = np.cos(angles), np.sin(angles)
    if isinstance(rope.scaling, YarnRopeScaling):
        cosines *= rope.scaling.attention_factor
        sines *= rope.scaling.attention_factor
    return cosines.astype(np.float32), sines.astype(np.float32)
