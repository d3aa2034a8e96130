"""What models there are: known by name, cached on this machine, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.families import parse_config
from tee_runner.models.identity import model_identity
from tee_runner.models.json_file import read_json_object
from tee_runner.models.registry import KNOWN_MODELS, cache_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One model. ``path``, ``size_bytes`` and ``identity`` (32 bytes) are None when it is not cached."""

    name: str
    family: str
    parameters: int
    path: Path | None = None
    size_bytes: int | None = None
    identity: bytes | None = None


def list_models(*, identities: bool = True) -> list[ModelListing]:
    """Known models and those in the cache, by name.

    ``identities`` hashes each cached model, which reads all of its weights.
    Raises ``ModelError`` when a cached model is malformed.
    """
    root = cache_directory()
    cached = {path.parent.name: path.parent for path in sorted(root.glob("[!.]*/config.json"))}
    listings = [_cached(name, path, identities) for name, path in cached.items()]
    listings += [
        ModelListing(name=model.name, family=model.family, parameters=model.parameters)
        for model in KNOWN_MODELS.values()
        if model.name not in cached
    ]
    return sorted(listings, key=lambda listing: listing.name)


def _cached(name: str, directory: Path, identities: bool) -> ModelListing:
    checkpoint = Checkpoint(directory)
    return ModelListing(
        name=name,
        family=parse_config(read_json_object(directory / "config.json")).family,
        parameters=sum(math.prod(checkpoint.entry(tensor).shape) for tensor in checkpoint),
        path=directory,
        size_bytes=sum(path.stat().st_size for path in directory.iterdir() if path.is_file()),
        identity=model_identity(directory) if identities else None,
    )
