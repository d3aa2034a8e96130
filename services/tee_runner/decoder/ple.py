"""Per-layer embeddings (PLE): a second, token-indexed input of every layer.

A row of a large table, picked by the token, is added to a projection of the token's embedding and
gates a small residual block at the end of each layer (Gemma 3n and 4; the reference is
``Gemma4TextModel.project_per_layer_inputs`` in transformers).

All of it runs here. Every operand of these products is a function of one token (the table row, the
embedding) or a product with one, so none of them is shown to the worker in any form; and two round
trips per layer for products this narrow would cost more than the products.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder import kernels
from tee_runner.decoder.weights import Float32, LayerPle, PleWeights

_HALF_POWER: Final = np.float32(math.sqrt(0.5))
_ONE: Final = np.float32(1.0)


def per_layer_inputs(
    weights: PleWeights, tokens: NDArray[np.int64], rows: Float32, epsilon: np.float32
) -> Float32:
    """What gates each layer: ``(layers, n, width)`` float32.

    The RMS-normalised projection of ``rows`` plus the tokens' rows of the table, over √2.

    Args:
        weights: the model's part of the PLE.
        tokens: ``(n,)`` int64.
        rows: ``(n, hidden_size)`` float32, the scaled embeddings of ``tokens``.
        epsilon: of the RMSNorm.

    Raises:
        InvalidRequestError: a token has no row.
    """
    embedded = weights.gather(tokens)
    n, layers, width = embedded.shape
    projected = rows @ weights.projection.T
    out = np.empty((layers, n, width), dtype=np.float32)
    kernels.per_layer_inputs(
        projected, embedded.reshape(n, layers * width), weights.norm, _ONE, _HALF_POWER, epsilon, out
    )
    return out


def per_layer_delta(rows: Float32, inputs: Float32, layer: LayerPle, out: Float32) -> None:
    """The PLE block of one layer before its norm: ``out = (gelu_tanh(rows·gateᵀ)·inputs)·projectionᵀ``.

    ``rows`` and ``out`` are ``(n, hidden_size)``, ``inputs`` ``(n, width)``, all float32.
    """
    gate = rows @ layer.gate.T
    kernels.gelu_times(gate, inputs, gate)
    np.matmul(gate, layer.projection.T, out=out)
