"""From checkpoint tensors to ``DecoderWeights``: names, shapes, merging and conversion."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.weights import DecoderWeights, Float16, Float32, LayerWeights, LinearSpec
from tee_runner.errors import InvalidRequestError, ModelError, UnsupportedModelError
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.half import to_float16

_EMBEDDING: Final = "model.embed_tokens.weight"
_FINAL_NORM: Final = "model.norm.weight"
_HEAD: Final = "lm_head.weight"

# Frequencies that older checkpoints stored; they follow from the configuration.
_HARMLESS: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_COMPARE_BYTES: Final = 1 << 24


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``config`` must hold."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv, d = config.q_dim, config.kv_dim, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (d,)
            shapes[prefix + "self_attn.k_norm.weight"] = (d,)
        for name, (d_out, d_in, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (d_out, d_in)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (d_out,)
    return shapes


def load_weights(checkpoint: Checkpoint, config: DecoderConfig) -> DecoderWeights:
    """The weights of ``config`` from ``checkpoint``; linear weights and the embedding stay on disk.

    Raises ``ModelError`` for a tensor that is missing, misshapen or not finite, and
    ``UnsupportedModelError`` for one that is not expected.
    """
    _check_tensors(checkpoint, config)
    layers = tuple(_layer(checkpoint, config, i) for i in range(config.num_layers))
    head = _EMBEDDING if config.tie_word_embeddings else _HEAD
    return DecoderWeights(
        embed=_embedding(checkpoint, config),
        layers=layers,
        final_norm=_vector(checkpoint, _FINAL_NORM),
        lm_head=_linear(checkpoint, "lm_head", config.hidden_size, [head]),
    )


def _check_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    expected = expected_tensors(config)
    for name, shape in expected.items():
        found = checkpoint.entry(name).shape
        if found != shape:
            raise ModelError(f"Tensor {name!r} has shape {found}; config.json asks for {shape}.")
    for name in checkpoint:
        if name in expected or _HARMLESS.fullmatch(name):
            continue
        if name == _HEAD and _same_tensor(checkpoint, _HEAD, _EMBEDDING):
            continue  # a tied head, stored twice
        raise UnsupportedModelError(f"The checkpoint holds the unexpected tensor {name!r}.")


def _same_tensor(checkpoint: Checkpoint, left: str, right: str) -> bool:
    a, b = checkpoint.entry(left), checkpoint.entry(right)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = checkpoint.raw(left), checkpoint.raw(right)
    steps = range(0, a.nbytes, _COMPARE_BYTES)
    return all(bytes(x[i : i + _COMPARE_BYTES]) == bytes(y[i : i + _COMPARE_BYTES]) for i in steps)


def _layer(checkpoint: Checkpoint, config: DecoderConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden = config.hidden_size
    qkv = [f"{prefix}self_attn.{part}_proj" for part in ("q", "k", "v")]
    gate_up = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
    o, down = [f"{prefix}self_attn.o_proj"], [f"{prefix}mlp.down_proj"]

    def linear(name: str, d_in: int, parts: list[str]) -> LinearSpec:
        return _linear(checkpoint, f"layers.{index}.{name}", d_in, [f"{part}.weight" for part in parts])

    def bias(parts: list[str], wanted: bool) -> Float32 | None:
        if not wanted:
            return None
        return np.concatenate([_vector(checkpoint, f"{part}.bias") for part in parts])

    return LayerWeights(
        input_norm=_vector(checkpoint, prefix + "input_layernorm.weight"),
        post_attention_norm=_vector(checkpoint, prefix + "post_attention_layernorm.weight"),
        q_norm=_vector(checkpoint, prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=_vector(checkpoint, prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
        qkv_bias=bias(qkv, config.qkv_bias),
        o_bias=bias(o, config.o_bias),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down_bias=bias(down, config.mlp_bias),
        qkv=linear("qkv", hidden, qkv),
        o=linear("o", config.q_dim, o),
        gate_up=linear("gate_up", hidden, gate_up),
        down=linear("down", config.intermediate_size, down),
    )


def _vector(checkpoint: Checkpoint, name: str) -> Float32:
    values = checkpoint.array(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelError(f"Tensor {name!r} holds values that are not finite.")
    return values


def _linear(checkpoint: Checkpoint, name: str, d_in: int, tensors: list[str]) -> LinearSpec:
    """One weight whose rows are those of ``tensors``, one after the other."""
    d_out = sum(checkpoint.entry(tensor).shape[0] for tensor in tensors)

    def load() -> Float16:
        weight = np.empty((d_out, d_in), np.float16)
        row = 0
        for tensor in tensors:
            part = checkpoint.array(tensor)
            to_float16(part, name=tensor, out=weight[row : row + len(part)])
            row += len(part)
        return weight

    return LinearSpec(name=name, d_in=d_in, d_out=d_out, load=load)


def _embedding(checkpoint: Checkpoint, config: DecoderConfig) -> Callable[[NDArray[np.int64]], Float32]:
    table = checkpoint.array(_EMBEDDING)

    def embed(ids: NDArray[np.int64]) -> Float32:
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise InvalidRequestError(f"Token ids must be a vector of int64, not {ids.dtype} {ids.shape}.")
        if ids.size and (ids.min() < 0 or ids.max() >= config.vocab_size):
            raise InvalidRequestError(f"A token id lies outside the vocabulary of {config.vocab_size}.")
        return table[ids].astype(np.float32)

    return embed
