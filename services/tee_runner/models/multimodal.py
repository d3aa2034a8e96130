"""The text part of a checkpoint that also holds vision and audio encoders.

The encoders are neither read nor served; the model identity covers their bytes all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from tee_runner.decoder.config import DecoderConfig
from tee_runner.errors import ModelError
from tee_runner.models.config_fields import ConfigReader
from tee_runner.models.dense import read_section
from tee_runner.models.safetensors_file import TensorEntry

_TEXT: Final = "model.language_model."
_ENCODERS: Final = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
# Sections and token ids of images, video and audio.
_ENCODER_KEYS: Final = (
    "vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id", "boi_token_id",
    "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image",
)  # fmt: skip


class Tensors(Protocol):
    """What weights are read from: a ``Checkpoint``, or the text part of one."""

    def __iter__(self) -> Iterator[str]:
        """Tensor names in sorted order."""

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and size of tensor ``name``."""

    def array(self, name: str) -> NDArray[Any]:
        """Tensor ``name`` as a read-only view of the mapped file."""

    def raw(self, name: str) -> memoryview:
        """The stored bytes of tensor ``name``."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Let go of the memory behind bytes of tensor ``name``, which stay readable."""


class _TextPart:
    """A checkpoint whose text tensors go by the names of a text model; the encoders' are left out."""

    def __init__(self, whole: Tensors) -> None:
        self._whole = whole
        self._names: dict[str, str] = {}
        for name in whole:
            if not name.startswith(_ENCODERS):
                own = "model." + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name
                if own in self._names:
                    raise ModelError(f"The checkpoint holds {own!r} twice, once as {self._names[own]!r}.")
                self._names[own] = name

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def entry(self, name: str) -> TensorEntry:
        return self._whole.entry(self._names.get(name, name))

    def array(self, name: str) -> NDArray[Any]:
        return self._whole.array(self._names.get(name, name))

    def raw(self, name: str) -> memoryview:
        return self._whole.raw(self._names.get(name, name))

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self._whole.release(self._names.get(name, name), start, stop)


def text_part(checkpoint: Tensors) -> Tensors:
    """``checkpoint`` itself when it is of a text model, else its text tensors under their plain names.

    Raises ``ModelError`` when two tensors would have one name.
    """
    return _TextPart(checkpoint) if any(name.startswith(_TEXT) for name in checkpoint) else checkpoint


def read_text_section(
    reader: ConfigReader, model_type: str, read_config: Callable[[ConfigReader], DecoderConfig]
) -> DecoderConfig:
    """The configuration in ``text_config``, whose ``model_type`` must be the one given.

    Raises ``ModelError`` naming key and value, also when both levels contradict each other.
    """
    for key in _ENCODER_KEYS:
        reader.value(key)
    section = read_section(reader, "text_config")
    section.expect("model_type", model_type)
    config = read_config(section)
    section.refuse_unread()
    if reader.boolean("tie_word_embeddings", default=config.tie_word_embeddings) != (
        config.tie_word_embeddings
    ):
        raise ModelError(f"{reader.where}: tie_word_embeddings contradicts the one in text_config.")
    return config
