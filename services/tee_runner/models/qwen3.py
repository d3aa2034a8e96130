"""Qwen3 dense models: query and key norms, explicit head size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

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
