"""What models there are: known by name, cached on this machine, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tee_runner.decoder.config import DecoderConfig
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.families import parse_config
from tee_runner.models.identity import model_identity
from tee_runner.models.json_file import read_json_object
from tee_runner.models.presets import PRESETS, preset_config
from tee_runner.models.registry import KNOWN_MODELS, cache_directory
from tee_runner.models.weights import expected_tensors

Availability = Literal["ready", "not pulled", "hub", "own weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One model.

    ``availability``: its directory is in the cache; pulling fetches it from the package index, or
    from the Hugging Face hub; or only its published constants are known, for a directory of one's
    own. ``path``, ``size_bytes`` and ``identity`` (32 bytes) are None when it is not cached.
    """

    name: str
    config: DecoderConfig
    parameters: int
    availability: Availability
    license: str = ""
    path: Path | None = None
    size_bytes: int | None = None
    identity: bytes | None = None

    @property
    def family(self) -> str:
        """The family's name, as in ``config.json``'s ``model_type``."""
        return self.config.family


def list_models(*, identities: bool = True) -> list[ModelListing]:
    """Known models and those in the cache, by name.

    ``identities`` hashes each cached model, which reads all of its weights.
    Raises ``ModelError`` when a cached model is malformed.
    """
    root = cache_directory()
    cached = {path.parent.name: path.parent for path in sorted(root.glob("[!.]*/config.json"))}
    listings = [_cached(name, path, identities) for name, path in cached.items()]
    listings += [_published(name) for name in PRESETS if name not in cached]
    return sorted(listings, key=lambda listing: listing.name)


def _cached(name: str, directory: Path, identities: bool) -> ModelListing:
    checkpoint = Checkpoint(directory)
    return ModelListing(
        name=name,
        config=parse_config(read_json_object(directory / "config.json")),
        parameters=sum(math.prod(checkpoint.entry(tensor).shape) for tensor in checkpoint),
        availability="ready",
        license=KNOWN_MODELS[name].license if name in KNOWN_MODELS else "",
        path=directory,
        size_bytes=sum(path.stat().st_size for path in directory.iterdir() if path.is_file()),
        identity=model_identity(directory) if identities else None,
    )


def _published(name: str) -> ModelListing:
    config, known = preset_config(name), KNOWN_MODELS.get(name)
    return ModelListing(
        name=name,
        config=config,
        parameters=sum(math.prod(shape) for shape in expected_tensors(config).values()),
        availability="own weights" if known is None else "hub" if known.hub_id else "not pulled",
        license="" if known is None else known.license,
    )
