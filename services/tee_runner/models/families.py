"""Which family a ``config.json`` belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import gemma3, gemma4, llama, mistral, qwen2, qwen3
from tee_runner.models.config_fields import ConfigReader, shown

_FAMILIES: Final[Mapping[str, tuple[str, Callable[[ConfigReader], DecoderConfig]]]] = {
    family.ARCHITECTURE: (family.MODEL_TYPE, family.read_config)
    for family in (gemma3, gemma4, llama, mistral, qwen2, qwen3)
} | {gemma4.MULTIMODAL_ARCHITECTURE: (gemma4.MULTIMODAL_TYPE, gemma4.read_multimodal_config)}


def parse_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder configuration that a parsed Hugging Face ``config.json`` describes.

    Raises ``UnsupportedModelError`` naming key and value for an unknown architecture and for any
    key that is neither implemented nor known to be harmless, and ``ModelError`` for missing keys
    and for values of the wrong type or out of bounds.
    """
    architectures = values.get("architectures")
    if architectures is None:
        raise ModelError("config.json lacks the required key 'architectures'.")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in list(_FAMILIES)
    ):
        raise UnsupportedModelError(
            f"config.json: architectures = {shown(architectures)} is not supported "
            f"(one of {', '.join(_FAMILIES)} is)."
        )
    model_type, read_config = _FAMILIES[architectures[0]]
    reader = ConfigReader(values)
    reader.expect("model_type", model_type)
    config = read_config(reader)
    reader.refuse_unread()
    return config
