"""Llama 2, 3, 3.1, 3.2 and models of the same form, such as SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

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


# config.json of HuggingFaceTB/SmolLM2-135M-Instruct: what decides the computation.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm2-135m-instruct": {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "tie_word_embeddings": True,
    }
}
