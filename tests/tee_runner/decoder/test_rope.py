"""RoPE frequencies and tables against float64 and against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tee_runner.decoder.config import LinearRopeScaling, Llama3RopeScaling, ProportionalRope, RopeConfig
from tee_runner.decoder.rope import inverse_frequencies, rope_tables
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING

from .references import THETA, hf_rotary


def test_proportional_rope_turns_the_leading_angles_only() -> None:
    whole = inverse_frequencies(RopeConfig(theta=THETA), 64)
    rope = RopeConfig(theta=THETA, scaling=ProportionalRope(partial_rotary_factor=0.25, factor=2.0))
    found = inverse_frequencies(rope, 64)
    np.testing.assert_array_equal(found[:8], whole[:8] / 2.0)
    assert not found[8:].any()
    cosines, sines = rope_tables(rope, 64, 30)
    assert (cosines[:, 8:] == 1).all()
    assert not sines[:, 8:].any()


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
