"""The published constants of models known by name, and the check that a configuration has them.

Each family's file holds its presets as the ``config.json`` of the published model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.errors import ModelError
from tee_runner.models import gemma3, gemma4, llama, qwen3
from tee_runner.models.config_fields import shown
from tee_runner.models.families import parse_config

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    **llama.PRESETS,
    **qwen3.PRESETS,
    **gemma3.PRESETS,
    **gemma4.PRESETS,
}


def preset_config(name: str) -> DecoderConfig:
    """The published configuration of the model ``name``. Raises ``ModelError`` for an unknown name."""
    values = PRESETS.get(name)
    if values is None:
        raise ModelError(f"There is no preset {name!r}.", remedy=f"Presets: {', '.join(PRESETS)}.")
    return parse_config(values)


def check_preset(name: str, config: DecoderConfig) -> None:
    """Raise ``ModelError`` naming every value in which ``config`` is not the published model ``name``."""
    published = preset_config(name)
    differences = [
        f"{field.name} is {shown(getattr(config, field.name))}, not {shown(getattr(published, field.name))}"
        for field in fields(DecoderConfig)
        if getattr(config, field.name) != getattr(published, field.name)
    ]
    if differences:
        raise ModelError(
            f"The configuration is not that of {name}: {'; '.join(differences)}.",
            remedy="Give its directory without a preset to serve it as what it says it is.",
        )
