"""Mistral 7B and models of the same form: one sliding window for all layers, or none."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.errors import ModelError
from tee_runner.models.config_fields import MAX_CONTEXT, ConfigReader
from tee_runner.models.dense import read_dimensions, read_rope

ARCHITECTURE: Final = "MistralForCausalLM"
MODEL_TYPE: Final = "mistral"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """The decoder configuration of a Mistral ``config.json``. Raises ``ModelError`` naming key and value."""
    dimensions = read_dimensions(reader)
    # An absent window means 4096 to some readers and none to others: it must be spelled out.
    if not reader.has("sliding_window"):
        raise ModelError("config.json lacks the required key 'sliding_window' (null for full attention).")
    window = None
    if "sliding_window" in reader:
        window = reader.integer("sliding_window", high=MAX_CONTEXT)
    return DecoderConfig(
        family=MODEL_TYPE,
        **asdict(dimensions),
        rope=read_rope(reader),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        sliding_windows=(window,) * dimensions.num_layers,
    )
