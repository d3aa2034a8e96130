"""Weights as the decoder sees them: small ones held, linear ones named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float16 = NDArray[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One public linear weight, computed by the worker.

    ``load`` reads it from the checkpoint on demand: ``(d_out, d_in)`` float16, C-contiguous.
    Merged weights (``qkv``, ``gate_up``) are row concatenations.
    """

    name: str
    d_in: int
    d_out: int
    load: Callable[[], Float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPle:
    """One layer's part of the per-layer embeddings; computed in the runner, never by the worker.

    ``gate`` ``(width, hidden_size)``, ``projection`` ``(hidden_size, width)``, ``norm``
    ``(hidden_size,)``; float32.
    """

    gate: Float32
    projection: Float32
    norm: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PleWeights:
    """The model's part of the per-layer embeddings; the table stays in the runner.

    ``gather`` maps token ids ``(n,)`` int64 to rows ``(n, layers, width)`` float32, scaled.
    ``projection`` ``(layers·width, hidden_size)`` and ``norm`` ``(width,)`` are float32; the
    factor 1/√hidden_size is in ``projection``.
    """

    gather: Callable[[NDArray[np.int64]], Float32]
    projection: Float32
    norm: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The parts of one layer that stay in the runner. Norm and bias vectors are float32.

    ``input_norm`` comes before attention and ``post_attention_norm`` before the MLP;
    ``attention_out_norm`` and ``mlp_out_norm``, in models with post-norms, are applied to what
    attention and MLP return. A layer that reads another's keys has no ``k_norm``.
    """

    input_norm: Float32
    post_attention_norm: Float32
    attention_out_norm: Float32 | None = None
    mlp_out_norm: Float32 | None = None
    q_norm: Float32 | None = None
    k_norm: Float32 | None = None
    qkv_bias: Float32 | None = None
    o_bias: Float32 | None = None
    gate_up_bias: Float32 | None = None
    down_bias: Float32 | None = None
    ple: LayerPle | None = None
    output_scale: float = 1.0
    qkv: LinearSpec
    o: LinearSpec
    gate_up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a model.

    ``embed`` maps token ids ``(n,)`` int64 to rows ``(n, hidden_size)`` float32, scaled; the table
    stays memory-mapped in the runner.
    """

    embed: Callable[[NDArray[np.int64]], Float32]
    layers: tuple[LayerWeights, ...]
    final_norm: Float32
    lm_head: LinearSpec
    ple: PleWeights | None = None

    def linears(self) -> Iterator[LinearSpec]:
        """Every weight the worker must hold, in the order of a forward pass."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield self.lm_head
