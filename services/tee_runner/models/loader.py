"""Open a model directory: configuration, weights, tokenizer and identity, each checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.weights import DecoderWeights
from tee_runner.errors import ModelError
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.families import parse_config
from tee_runner.models.identity import compute_identity
from tee_runner.models.json_file import read_json_object
from tee_runner.models.multimodal import text_part
from tee_runner.models.presets import check_preset
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.safetensors_file import DTYPES
from tee_runner.models.tokenizer import Tokenizer
from tee_runner.models.weights import EMBEDDING, load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to be served. ``identity`` is 32 bytes, see ``tee_runner.models.identity``."""

    directory: Path
    config: DecoderConfig
    weights: DecoderWeights
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    identity: bytes


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """What can be known of a model without reading its weights.

    ``embedding_bytes_per_value`` is that of the embedding as it is stored.
    """

    config: DecoderConfig
    embedding_bytes_per_value: int


def read_header(directory: Path, *, preset: str | None = None) -> ModelHeader:
    """Configuration and stored type of the model in ``directory``.

    Raises as :func:`load_model` does, whose checks of values and tokenizer it leaves out.
    """
    config = _read_config(directory, preset)[1]
    entry = text_part(Checkpoint(directory)).entry(EMBEDDING)
    return ModelHeader(config, DTYPES[entry.dtype].itemsize)


def _read_config(directory: Path, preset: str | None) -> tuple[dict[str, Any], DecoderConfig]:
    if not directory.is_dir():
        raise ModelError(f"There is no model directory {directory}.")
    values = read_json_object(directory / "config.json")
    config = parse_config(values)
    if preset is not None:
        check_preset(preset, config)
    return values, config


def load_model(
    directory: Path, *, preset: str | None = None, progress: Progress | None = None,
    oblivious_embedding: bool = False,
) -> LoadedModel:  # fmt: skip
    """The model in ``directory`` (Hugging Face layout).

    With ``preset``, its configuration must be that of the published model of this name. Linear
    weights and the embedding table stay memory-mapped; the rest is small and read here.
    With ``oblivious_embedding``, which row of a token-indexed table is wanted does not decide what is read.
    ``progress`` is told the stages ``per-layer table`` (of models that have one) and ``identity``.
    Raises ``ModelError`` for anything missing or malformed and ``UnsupportedModelError`` for what
    the decoder does not implement.
    """
    values, config = _read_config(directory, preset)
    tokenizer = Tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"The tokenizer has {tokenizer.vocab_size} ids, the embedding only {config.vocab_size} rows."
        )
    checkpoint = Checkpoint(directory)
    weights = load_weights(
        checkpoint, config, progress=progress or no_progress, oblivious=oblivious_embedding
    )
    identity = compute_identity(
        directory,
        values=values,
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        progress=progress or no_progress,
    )
    return LoadedModel(
        directory=directory,
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        identity=identity,
    )
