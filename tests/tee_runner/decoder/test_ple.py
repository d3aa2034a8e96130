"""Per-layer embeddings against the same formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tee_runner.decoder.ple import per_layer_delta, per_layer_inputs
from tee_runner.decoder.weights import LayerPle, PleWeights

LAYERS, WIDTH, HIDDEN, VOCAB = 3, 16, 40, 25
EPSILON = np.float32(1e-6)
# Sums of up to 40 products in float32, a norm, an exponential: some tens of roundings of 6e-8.
TOLERANCE = 4e-6


def random(seed: int, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_inputs(n: int) -> None:
    table = random(1, VOCAB, LAYERS, WIDTH)
    weights = PleWeights(
        gather=lambda ids: table[ids],
        projection=random(2, LAYERS * WIDTH, HIDDEN),
        norm=1 + 0.2 * random(3, WIDTH),
    )
    tokens = np.random.default_rng(4).integers(0, VOCAB, n)
    rows = random(5, n, HIDDEN)
    kept = rows.copy()
    made = per_layer_inputs(weights, tokens, rows, EPSILON)
    projected = (rows.astype(np.float64) @ weights.projection.T.astype(np.float64)).reshape(n, LAYERS, WIDTH)
    normed = projected / np.sqrt(np.square(projected).mean(axis=2, keepdims=True) + 1e-6) * weights.norm
    expected = (normed + table[tokens]) / np.sqrt(2)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, expected.transpose(1, 0, 2), rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(rows, kept)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_delta(n: int) -> None:
    layer = LayerPle(
        gate=random(6, WIDTH, HIDDEN) / 4, projection=random(7, HIDDEN, WIDTH), norm=random(8, HIDDEN)
    )
    rows, inputs = random(9, n, HIDDEN), random(10, n, WIDTH)
    kept = inputs.copy()
    out = np.full((n, HIDDEN), np.nan, np.float32)
    per_layer_delta(rows, inputs, layer, out)
    gate = rows.astype(np.float64) @ layer.gate.T.astype(np.float64)
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    expected = (gelu * inputs) @ layer.projection.T.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=TOLERANCE, atol=5 * TOLERANCE)
    np.testing.assert_array_equal(inputs, kept)
