"""Gemma 4 dense text models (E2B, E4B, 31B): per-layer embeddings, shared keys, two head sizes.

What differs from Gemma 3: global layers have larger heads and rotate only part of them; values are
normalised; a global layer may use its key projection for the values (``attention_k_eq_v``); the
last ``num_kv_shared_layers`` layers read the keys and values of the last layer of their kind
before them, and may have an MLP of twice the width; every layer ends with a per-layer embedding
and a scalar; attention scores are not scaled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig, LayerConfig
from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.config_fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigReader,
)
from tee_runner.models.dense import Dimensions, read_section
from tee_runner.models.gemma import (
    GLOBAL,
    LOCAL,
    embed_scale,
    read_gemma_dimensions,
    read_layer_types,
    read_ropes,
    read_softcap,
)
from tee_runner.models.multimodal import read_text_section

ARCHITECTURE: Final = "Gemma4ForCausalLM"
MODEL_TYPE: Final = "gemma4_text"
# Published checkpoints: the text model beside encoders for images and sound.
MULTIMODAL_ARCHITECTURE: Final = "Gemma4ForConditionalGeneration"
MULTIMODAL_TYPE: Final = "gemma4"

_GLOBAL_HEAD_DIM: Final = 512
_GLOBAL_ROPE: Final = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_INDEX: Final = re.compile(r"[0-9]{1,5}")
_EXPERT_KEYS: Final = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Gemma 4 text ``config.json``.

    Raises ``UnsupportedModelError`` for the mixture-of-experts variants, by name, and
    ``ModelError`` naming key and value.
    """
    _refuse_experts(reader)
    sizes = read_gemma_dimensions(reader)
    # The reference makes the last layer global whatever the configuration says.
    types = (*read_layer_types(reader, sizes.num_layers)[:-1], GLOBAL)
    attention_bias = reader.boolean("attention_bias", default=False)
    layers = _layers(reader, sizes, types)
    width = reader.integer("hidden_size_per_layer_input", low=0, high=MAX_WIDTH, default=256)
    ple_vocab = reader.integer("vocab_size_per_layer_input", high=MAX_VOCAB, default=sizes.vocab_size)
    if width and ple_vocab < sizes.vocab_size:
        raise ModelError(
            f"{reader.where}: vocab_size_per_layer_input = {ple_vocab} is less than "
            f"vocab_size = {sizes.vocab_size}."
        )
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(sizes),
        rope=layers[-1].rope,
        layers=layers,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=True),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        activation="gelu_tanh",
        embed_scale=embed_scale(sizes.hidden_size),
        query_scale=1.0,
        final_logit_softcap=read_softcap(reader, "final_logit_softcapping"),
        post_norms=True,
        value_norm=True,
        layer_scalar=True,
        per_layer_input_width=width,
        per_layer_vocab_size=ple_vocab if width else 0,
    )


def read_multimodal_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of the text part of a multimodal Gemma 4. Raises as :func:`read_config`."""
    return read_text_section(reader, MODEL_TYPE, read_config)


def _refuse_experts(reader: ConfigReader) -> None:
    if reader.boolean("enable_moe_block", default=False):
        raise UnsupportedModelError(
            f"{reader.where}: enable_moe_block = True: Gemma 4 mixture-of-experts models (26B-A4B) are "
            "not supported.",
            remedy="Use a dense Gemma 4 model: E2B, E4B or 31B.",
        )
    for key in _EXPERT_KEYS:
        if reader.value(key) is not None:
            raise reader.unsupported(key, "a mixture-of-experts model")


def _layers(reader: ConfigReader, sizes: Dimensions, types: Sequence[str]) -> tuple[LayerConfig, ...]:
    ropes = read_ropes(reader, full_default=_GLOBAL_ROPE)
    window = reader.integer("sliding_window", high=MAX_CONTEXT, default=512)
    k_eq_v = reader.boolean("attention_k_eq_v", default=False)
    shared = reader.integer("num_kv_shared_layers", low=0, high=MAX_LAYERS, default=0)
    double_wide = reader.boolean("use_double_wide_mlp", default=False)
    if shared >= len(types):
        raise ModelError(
            f"{reader.where}: num_kv_shared_layers = {shared} leaves none of {len(types)} layers with keys."
        )
    shapes = _head_shapes(reader, sizes, types, k_eq_v=k_eq_v)
    first = len(types) - shared
    layers: list[LayerConfig] = []
    for index, kind in enumerate(types):
        kv_heads, head_dim = shapes[index]
        layer = LayerConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=sizes.intermediate_size,
            rope=ropes.local if kind == LOCAL else ropes.full,
            window=window if kind == LOCAL else None,
            k_eq_v=k_eq_v and kind == GLOBAL,
        )
        if index >= first:
            source = _source(reader, types, first, kind)
            if shapes[source] != shapes[index]:
                raise ModelError(
                    f"{reader.where}: layer {index} cannot read the keys of layer {source}: "
                    "their heads differ."
                )
            width = sizes.intermediate_size * (2 if double_wide else 1)
            layer = replace(layer, kv_source=source, intermediate_size=width)
        layers.append(layer)
    return tuple(layers)


def _source(reader: ConfigReader, types: Sequence[str], first: int, kind: str) -> int:
    """The last layer of ``kind`` before ``first``, whose keys the later ones read."""
    for index in reversed(range(first)):
        if types[index] == kind:
            return index
    raise ModelError(
        f"{reader.where}: num_kv_shared_layers = {len(types) - first} leaves no {kind} layer with keys."
    )


def _head_shapes(
    reader: ConfigReader, sizes: Dimensions, types: Sequence[str], *, k_eq_v: bool
) -> list[tuple[int, int]]:
    """Key/value heads and head size of each layer.

    Published files give ``global_head_dim`` and ``num_global_key_value_heads``; the latter counts
    only where keys are values. transformers writes ``per_layer_config`` in their place.
    """
    shapes = [(sizes.num_kv_heads, sizes.head_dim)] * len(types)
    head_dim = reader.integer("global_head_dim", high=MAX_WIDTH, default=_GLOBAL_HEAD_DIM)
    kv_heads = reader.integer("num_global_key_value_heads", high=MAX_HEADS, default=sizes.num_kv_heads)
    if reader.value("per_layer_config") is not None:
        if "global_head_dim" in reader or "num_global_key_value_heads" in reader:
            raise ModelError(f"{reader.where} has both per_layer_config and sizes of global layers.")
        shapes = _overridden(read_section(reader, "per_layer_config"), shapes)
    else:
        own = (kv_heads if k_eq_v else sizes.num_kv_heads, head_dim)
        shapes = [own if kind == GLOBAL else shape for kind, shape in zip(types, shapes, strict=True)]
    for heads, dim in shapes:
        if dim % 2 or sizes.num_heads % heads:
            raise ModelError(
                f"{reader.where}: {heads} key/value heads of size {dim} do not fit {sizes.num_heads} heads "
                "(the size must be even)."
            )
    return shapes


def _overridden(overrides: ConfigReader, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``shapes`` with those of single layers replaced; a key is a layer's index, zeros before it allowed."""
    changed: dict[int, tuple[int, int]] = {}
    for key in overrides:
        index = int(key) if _INDEX.fullmatch(key) else len(shapes)
        if index >= len(shapes) or index in changed:
            raise overrides.unsupported(key, "no such layer, or one that is named twice")
        fields = read_section(overrides, key)
        kv_heads, head_dim = shapes[index]
        changed[index] = (
            fields.integer("num_key_value_heads", high=MAX_HEADS, default=kv_heads),
            fields.integer("head_dim", high=MAX_WIDTH, default=head_dim),
        )
        fields.refuse_unread()
    return [changed.get(index, shape) for index, shape in enumerate(shapes)]


def _preset(
    *, layers: int, hidden: int, mlp: int, kv_heads: int, shared: int, every: int, double_wide: bool
) -> Mapping[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "global_head_dim": _GLOBAL_HEAD_DIM,
        "layer_types": [GLOBAL if (i + 1) % every == 0 else LOCAL for i in range(layers)],
        "sliding_window": 512,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double_wide,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


# config.json of the text part of the published models: what a configuration must say to be one.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma-4-e2b": _preset(
        layers=35, hidden=1536, mlp=6144, kv_heads=1, shared=20, every=5, double_wide=True
    ),
    "gemma-4-e4b": _preset(
        layers=42, hidden=2560, mlp=10_240, kv_heads=2, shared=18, every=6, double_wide=False
    ),
}
