"""Qwen3 dense models: query and key norms, explicit head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.models.config_fields import ConfigReader
from tee_runner.models.dense import read_dimensions, read_layer_windows, read_rope

ARCHITECTURE: Final = "Qwen3ForCausalLM"
MODEL_TYPE: Final = "qwen3"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Qwen3 ``config.json``. Raises ``ModelError`` naming key and value."""
    dimensions = read_dimensions(reader, head_dim_required=True)
    attention_bias = reader.boolean("attention_bias", default=False)
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(dimensions),
        rope=read_rope(reader),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sliding_windows=read_layer_windows(reader, dimensions.num_layers),
    )


def _preset(*, layers: int, hidden: int, mlp: int, heads: int) -> Mapping[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
    }


# config.json of the published models (Qwen/Qwen3-1.7B, Qwen/Qwen3-4B): what decides the computation.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-1.7b": _preset(layers=28, hidden=2048, mlp=6144, heads=16),
    "qwen3-4b": _preset(layers=36, hidden=2560, mlp=9728, heads=32),
}
