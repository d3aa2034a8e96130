"""Open a model directory: configuration, weights, tokenizer and identity, each checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.weights import DecoderWeights
from tee_runner.errors import ModelError
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.families import parse_config
from tee_runner.models.identity import compute_identity
from tee_runner.models.json_file import read_json_object
from tee_runner.models.presets import check_preset
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.tokenizer import Tokenizer
from tee_runner.models.weights import load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to be served. ``identity`` is 32 bytes, see ``tee_runner.models.identity``."""

    directory: Path
    config: DecoderConfig
    weights: DecoderWeights
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    identity: bytes


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
    if not directory.is_dir():
        raise ModelError(f"There is no model directory {directory}.")
    values = read_json_object(directory / "config.json")
    config = parse_config(values)
    if preset is not None:
        check_preset(preset, config)
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
