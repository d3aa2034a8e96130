"""Llama 2, 3, 3.1, 3.2 and models of the same form, such as SmolLM2."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.models.config_fields import ConfigReader
from tee_runner.models.dense import read_dimensions, read_rope

ARCHITECTURE: Final = "LlamaForCausalLM"
MODEL_TYPE: Final = "llama"

# Llama 2 was published without rope_theta.
_DEFAULT_THETA: Final = 10_000.0


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Llama ``config.json``. Raises ``ModelError`` naming key and value."""
    dimensions = read_dimensions(reader)
    attention_bias = reader.boolean("attention_bias", default=False)
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(dimensions),
        rope=read_rope(reader, default_theta=_DEFAULT_THETA),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", default=False),
        sliding_windows=(None,) * dimensions.num_layers,
    )
