"""Qwen2 and Qwen2.5 dense models: biases on query, key and value only."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.models.config_fields import ConfigReader
from tee_runner.models.dense import read_dimensions, read_layer_windows, read_rope

ARCHITECTURE: Final = "Qwen2ForCausalLM"
MODEL_TYPE: Final = "qwen2"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Qwen2 ``config.json``. Raises ``ModelError`` naming key and value."""
    dimensions = read_dimensions(reader)
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(dimensions),
        rope=read_rope(reader),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        qkv_bias=True,
        sliding_windows=read_layer_windows(reader, dimensions.num_layers),
    )
