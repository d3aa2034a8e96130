"""Gemma 3 text models (270M, 1B): five local layers to a global one, norms on both sides.

Embeddings are scaled by √hidden_size, norm weights are stored as w for 1 + w, the MLP is GeGLU
in its tanh form, and local and global layers differ in window and rotary base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig, LayerConfig
from tee_runner.models.config_fields import MAX_CONTEXT, ConfigReader
from tee_runner.models.gemma import (
    LOCAL,
    embed_scale,
    read_gemma_dimensions,
    read_layer_types,
    read_ropes,
    read_softcap,
)

ARCHITECTURE: Final = "Gemma3ForCausalLM"
MODEL_TYPE: Final = "gemma3_text"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Gemma 3 ``config.json``. Raises ``ModelError`` naming key and value."""
    sizes = read_gemma_dimensions(reader)
    types = read_layer_types(reader, sizes.num_layers)
    ropes = read_ropes(reader)
    window = reader.integer("sliding_window", high=MAX_CONTEXT) if LOCAL in types else None
    reader.value("sliding_window")
    attention_bias = reader.boolean("attention_bias", default=False)
    if reader.value("attn_logit_softcapping") is not None:
        raise reader.unsupported("attn_logit_softcapping", "the reference ignores it")
    layers = tuple(
        LayerConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
            rope=ropes.local if kind == LOCAL else ropes.full,
            window=window if kind == LOCAL else None,
        )
        for kind in types
    )
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(sizes),
        rope=ropes.full,
        layers=layers,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=True),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        activation="gelu_tanh",
        embed_scale=embed_scale(sizes.hidden_size),
        norm_offset=1.0,
        query_scale=reader.number("query_pre_attn_scalar", low=1e-3, high=1e6) ** -0.5,
        final_logit_softcap=read_softcap(reader, "final_logit_softcapping"),
        post_norms=True,
    )


# config.json of google/gemma-3-270m: what decides the computation.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma-3-270m": {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "tie_word_embeddings": True,
    }
}
