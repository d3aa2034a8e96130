"""Small integers: symmetric, deterministic, and never enough to overflow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import ModelError
from tee_runner.protection.lpn.quantise import SUM_LIMIT, most_activation_bits, quantise

from .words_worker import weight_of


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_weight_is_its_values_times_its_scales(d_out: int, d_in: int, wide: bool, seed: int) -> None:
    weight = weight_of(seed, d_out, d_in)
    quantised = quantise(weight, wide=wide)
    values, scales = quantised.values.astype(np.float64), quantised.scales.astype(np.float64)
    exact = weight.astype(np.float64)
    # Half a step, and what float32 loses in the scale, the factor and the product.
    assert (
        np.abs(values * scales[:, None] - exact) <= 0.5 * scales[:, None] + np.abs(exact) * 2.0**-22
    ).all()
    largest = np.abs(values).max(axis=1)
    assert quantised.values.dtype == (np.int16 if wide else np.int8)
    assert len(set(largest[scales > 0])) <= 1
    assert (largest <= (2**14 - 1 if wide else 127)).all()


@pytest.mark.parametrize("wide", [False, True])
def test_the_worst_row_stays_below_the_limit(wide: bool) -> None:
    generator = np.random.default_rng(5)
    for weight in (weight_of(1, 7, 3000), generator.choice([-1, 1], (4, 9000)).astype(np.float16)):
        quantised = quantise(weight, wide=wide)
        values = quantised.values.astype(np.int64)
        worst = np.sign(values) * quantised.levels
        reached = np.abs((worst * values).sum(axis=1)).max()
        assert reached < SUM_LIMIT
        # One more bit and this row, which a model may well produce, would be out of range.
        more = 2 * quantised.levels + 1
        assert quantised.activation_bits == 16 or np.abs(values).sum(axis=1).max() * more >= SUM_LIMIT


def test_bits_are_the_most_there_is_room_for() -> None:
    assert most_activation_bits(1) == 16
    assert most_activation_bits((SUM_LIMIT - 1) // 32767) == 16
    assert most_activation_bits((SUM_LIMIT - 1) // 32767 + 1) == 15
    assert most_activation_bits(127 * 9728) == 10


def test_wide_weights_leave_the_activations_twelve_bits() -> None:
    quantised = quantise(weight_of(3, 5, 2560), wide=True)
    assert quantised.activation_bits >= 12
    assert np.abs(quantised.values).max() > 127


def test_zero_rows_and_extremes() -> None:
    weight = np.zeros((4, 6), np.float16)
    weight[1] = 65504.0
    weight[2] = 2.0**-24
    weight[3, 0] = -1.0
    quantised = quantise(weight)
    assert not quantised.values[0].any()
    assert quantised.scales[0] == 0.0
    assert (quantised.values[1] == 127).all()
    assert (quantised.values[2] == 127).all()
    assert quantised.values[3, 0] == -127


def test_what_is_not_finite_is_refused() -> None:
    for value in (np.nan, np.inf, -np.inf):
        weight = np.ones((2, 3), np.float16)
        weight[1, 2] = value
        with pytest.raises(ModelError, match="not finite"):
            quantise(weight)


def test_rows_without_room_are_refused() -> None:
    with pytest.raises(ModelError, match="no room"):
        quantise(np.ones((1, 1 << 21), np.float16))
