"""From checkpoint tensors to ``DecoderWeights``: names, shapes, merging and conversion."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import DecoderConfig, LayerConfig
from tee_runner.decoder.oblivious import gather
from tee_runner.decoder.weights import (
    DecoderWeights,
    Float16,
    Float32,
    LayerPle,
    LayerWeights,
    LinearSpec,
    PleWeights,
)
from tee_runner.errors import InvalidRequestError, ModelError, UnsupportedModelError
from tee_runner.models.half import to_float16
from tee_runner.models.multimodal import Tensors, text_part
from tee_runner.models.per_layer_table import PerLayerTable
from tee_runner.models.progress import Progress, no_progress

EMBEDDING: Final = "model.embed_tokens.weight"
_FINAL_NORM: Final = "model.norm.weight"
_HEAD: Final = "lm_head.weight"
_PLE_TABLE: Final = "model.embed_tokens_per_layer.weight"
_PLE_PROJECTION: Final = "model.per_layer_model_projection.weight"
_PLE_NORM: Final = "model.per_layer_projection_norm.weight"

# Frequencies that older checkpoints stored; they follow from the configuration.
_HARMLESS: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# What a layer that reads another's keys would have projected: published checkpoints still hold it.
_SHARED_KV: Final = re.compile(
    r"model\.layers\.(\d{1,4})\.self_attn\.([kv]_proj\.(weight|bias)|[kv]_norm\.weight)"
)

_COMPARE_BYTES: Final = 1 << 24
# Read at a time from a weight that passes through.
_LOAD_BYTES: Final = 1 << 24


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``config`` must hold."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    if config.per_layer_input_width:
        packed = config.num_layers * config.per_layer_input_width
        shapes[_PLE_TABLE] = (config.per_layer_vocab_size, packed)
        shapes[_PLE_PROJECTION] = (packed, hidden)
        shapes[_PLE_NORM] = (config.per_layer_input_width,)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{k}": v for k, v in _layer_tensors(config, index).items()}
    return shapes


def _layer_tensors(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, named from the layer on."""
    layer, hidden = config.layer(index), config.hidden_size
    projections = {
        "self_attn.q_proj": (layer.q_dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, layer.q_dim, config.o_bias),
        "mlp.gate_proj": (layer.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (layer.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, layer.intermediate_size, config.mlp_bias),
    }
    for part in _qkv_parts(layer)[1:]:
        projections[f"self_attn.{part}_proj"] = (layer.kv_dim, hidden, config.qkv_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (layer.head_dim,)
        if layer.kv_source is None:
            shapes["self_attn.k_norm.weight"] = (layer.head_dim,)
    if config.per_layer_input_width:
        shapes["per_layer_input_gate.weight"] = (config.per_layer_input_width, hidden)
        shapes["per_layer_projection.weight"] = (hidden, config.per_layer_input_width)
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    if config.layer_scalar:
        shapes["layer_scalar"] = (1,)
    for name, (d_out, d_in, bias) in projections.items():
        shapes[f"{name}.weight"] = (d_out, d_in)
        if bias:
            shapes[f"{name}.bias"] = (d_out,)
    return shapes


def _qkv_parts(layer: LayerConfig) -> tuple[str, ...]:
    """What the merged projection of a layer is made of, in order."""
    if layer.kv_source is not None:
        return ("q",)
    return ("q", "k") if layer.k_eq_v else ("q", "k", "v")


def load_weights(
    checkpoint: Tensors, config: DecoderConfig, *, progress: Progress = no_progress, oblivious: bool = False
) -> DecoderWeights:
    """The weights of ``config`` from ``checkpoint``; linear weights and the embedding stay on disk.

    Of a multimodal checkpoint only the text part is looked at.
    ``progress`` is told the stage ``per-layer table`` in elements, for models that have one. With
    ``oblivious``, rows of token-indexed tables are looked up by reading all of the table.
    Raises ``ModelError`` for a tensor that is missing, misshapen or not finite, and
    ``UnsupportedModelError`` for one that is not expected.
    """
    checkpoint = text_part(checkpoint)
    _check_tensors(checkpoint, config)
    layers = tuple(_layer(checkpoint, config, i) for i in range(config.num_layers))
    head = EMBEDDING if config.tie_word_embeddings else _HEAD
    return DecoderWeights(
        embed=_embedding(checkpoint, config, oblivious=oblivious),
        layers=layers,
        final_norm=_norm(checkpoint, config, _FINAL_NORM),
        lm_head=_linear(checkpoint, "lm_head", config.hidden_size, [head]),
        ple=_ple(checkpoint, config, progress, oblivious=oblivious) if config.per_layer_input_width else None,
    )


def _check_tensors(checkpoint: Tensors, config: DecoderConfig) -> None:
    expected = expected_tensors(config)
    for name, shape in expected.items():
        found = checkpoint.entry(name).shape
        if found != shape:
            raise ModelError(f"Tensor {name!r} has shape {found}; config.json asks for {shape}.")
    for name in checkpoint:
        if name in expected or _HARMLESS.fullmatch(name):
            continue
        if (shared := _SHARED_KV.fullmatch(name)) and _reads_other_keys(config, int(shared[1])):
            continue
        if name == _HEAD and _same_tensor(checkpoint, _HEAD, EMBEDDING):
            continue  # a tied head, stored twice
        raise UnsupportedModelError(f"The checkpoint holds the unexpected tensor {name!r}.")


def _same_tensor(checkpoint: Tensors, left: str, right: str) -> bool:
    a, b = checkpoint.entry(left), checkpoint.entry(right)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = checkpoint.raw(left), checkpoint.raw(right)
    steps = range(0, a.nbytes, _COMPARE_BYTES)
    return all(bytes(x[i : i + _COMPARE_BYTES]) == bytes(y[i : i + _COMPARE_BYTES]) for i in steps)


def _reads_other_keys(config: DecoderConfig, index: int) -> bool:
    return index < config.num_layers and config.layer(index).kv_source is not None


def _layer(checkpoint: Tensors, config: DecoderConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    layer, hidden = config.layer(index), config.hidden_size
    qkv = [f"{prefix}self_attn.{part}_proj" for part in _qkv_parts(layer)]
    gate_up = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
    o, down = [f"{prefix}self_attn.o_proj"], [f"{prefix}mlp.down_proj"]

    def linear(name: str, d_in: int, parts: list[str]) -> LinearSpec:
        return _linear(checkpoint, f"layers.{index}.{name}", d_in, [f"{part}.weight" for part in parts])

    def bias(parts: list[str], wanted: bool) -> Float32 | None:
        if not wanted:
            return None
        return np.concatenate([_vector(checkpoint, f"{part}.bias") for part in parts])

    def norm(name: str, wanted: bool = True) -> Float32 | None:
        return _norm(checkpoint, config, f"{prefix}{name}.weight") if wanted else None

    # With post-norms, the name that Llama gives the norm before the MLP is that of the norm after
    # attention.
    post = config.post_norms
    before_mlp = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return LayerWeights(
        input_norm=_norm(checkpoint, config, prefix + "input_layernorm.weight"),
        post_attention_norm=_norm(checkpoint, config, f"{prefix}{before_mlp}.weight"),
        attention_out_norm=norm("post_attention_layernorm", post),
        mlp_out_norm=norm("post_feedforward_layernorm", post),
        q_norm=norm("self_attn.q_norm", config.qk_norm),
        k_norm=norm("self_attn.k_norm", config.qk_norm and layer.kv_source is None),
        qkv_bias=bias(qkv, config.qkv_bias),
        o_bias=bias(o, config.o_bias),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down_bias=bias(down, config.mlp_bias),
        ple=_layer_ple(checkpoint, config, prefix) if config.per_layer_input_width else None,
        output_scale=float(_vector(checkpoint, prefix + "layer_scalar")[0]) if config.layer_scalar else 1.0,
        qkv=linear("qkv", hidden, qkv),
        o=linear("o", layer.q_dim, o),
        gate_up=linear("gate_up", hidden, gate_up),
        down=linear("down", layer.intermediate_size, down),
    )


def _layer_ple(checkpoint: Tensors, config: DecoderConfig, prefix: str) -> LayerPle:
    return LayerPle(
        gate=_vector(checkpoint, prefix + "per_layer_input_gate.weight"),
        projection=_vector(checkpoint, prefix + "per_layer_projection.weight"),
        norm=_norm(checkpoint, config, prefix + "post_per_layer_input_norm.weight"),
    )


def _ple(checkpoint: Tensors, config: DecoderConfig, progress: Progress, *, oblivious: bool) -> PleWeights:
    table = PerLayerTable(
        checkpoint.array(_PLE_TABLE),
        layers=config.num_layers,
        name=_PLE_TABLE,
        progress=lambda done, total: progress("per-layer table", done, total),
        oblivious=oblivious,
    )
    checkpoint.release(_PLE_TABLE)  # the copy in memory is what tokens index
    projection = _vector(checkpoint, _PLE_PROJECTION)
    projection *= np.float32(config.hidden_size**-0.5)
    return PleWeights(gather=table.gather, projection=projection, norm=_norm(checkpoint, config, _PLE_NORM))


def _norm(checkpoint: Tensors, config: DecoderConfig, name: str) -> Float32:
    weight = _vector(checkpoint, name)
    if config.norm_offset:
        weight += np.float32(config.norm_offset)
    return weight


def _vector(checkpoint: Tensors, name: str) -> Float32:
    """A small tensor as a float32 array of its own."""
    values = checkpoint.array(name).astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelError(f"Tensor {name!r} holds values that are not finite.")
    return values


def _linear(checkpoint: Tensors, name: str, d_in: int, tensors: list[str]) -> LinearSpec:
    """One weight whose rows are those of ``tensors``, one after the other."""
    d_out = sum(checkpoint.entry(tensor).shape[0] for tensor in tensors)

    def load() -> Float16:
        weight = np.empty((d_out, d_in), np.float16)
        row = 0
        for tensor in tensors:
            part = checkpoint.array(tensor)
            step = max(1, _LOAD_BYTES // part[0].nbytes)
            for start in range(0, len(part), step):
                block = part[start : start + step]
                to_float16(block, name=tensor, out=weight[row : row + len(block)])
                row += len(block)
                if tensor != EMBEDDING:  # whose rows tokens pick: they must not be fetched one by one
                    checkpoint.release(tensor, start * part[0].nbytes, (start + step) * part[0].nbytes)
        return weight

    return LinearSpec(name=name, d_in=d_in, d_out=d_out, load=load)


def _embedding(
    checkpoint: Tensors, config: DecoderConfig, *, oblivious: bool
) -> Callable[[NDArray[np.int64]], Float32]:
    table = checkpoint.array(EMBEDDING)

    def embed(ids: NDArray[np.int64]) -> Float32:
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise InvalidRequestError(f"Token ids must be a vector of int64, not {ids.dtype} {ids.shape}.")
        if ids.size and (ids.min() < 0 or ids.max() >= config.vocab_size):
            raise InvalidRequestError(f"A token id lies outside the vocabulary of {config.vocab_size}.")
        rows: Float32 = gather(table, ids, oblivious=oblivious).astype(np.float32)
        if config.embed_scale != 1.0:
            rows *= np.float32(config.embed_scale)
        return rows

    return embed
