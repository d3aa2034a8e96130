"""Strict reading of a Hugging Face ``config.json``: every key is understood, harmless, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tee_runner.errors import ModelError, UnsupportedModelError

# Bounds against hostile configurations: an order of magnitude above any published dense model.
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_WIDTH: Final = 262_144
MAX_VOCAB: Final = 4_194_304
MAX_CONTEXT: Final = 16_777_216

# Keys that do not change what the forward pass computes at inference.
HARMLESS_KEYS: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

# Keys that are harmless only at this value: the one that leaves the computation as it is.
NEUTRAL_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_bias": (False, None),
    "is_encoder_decoder": (False,),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}


class ConfigReader:
    """Typed, bounded getters over a parsed ``config.json`` that remember which keys were read.

    Getters raise ``ModelError`` for a missing key or a value of the wrong type or out of bounds,
    naming both.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = "config.json") -> None:
        self._values = values
        self.where = where
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        """Every key, in the order of the file."""
        return iter(self._values)

    def has(self, key: str) -> bool:
        """Whether ``key`` is present, be it null."""
        return key in self._values

    def value(self, key: str) -> Any:
        """The raw value of ``key``, None when absent; counts as read."""
        self._read.add(key)
        return self._values.get(key)

    def _required(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.where} lacks the required key {key!r}.")
        return default

    def integer(self, key: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """The integer ``key`` within ``low..high``."""
        value = self._required(key, default)
        if type(value) is not int or not low <= value <= high:
            raise ModelError(f"{self.where}: {key} = {shown(value)} is not an integer within {low}..{high}.")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """The finite number ``key`` within ``low..high``."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} = {shown(value)} is not a number within {low}..{high}.")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """The boolean ``key``; ``default`` when it is absent or null."""
        value = self.value(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise ModelError(f"{self.where}: {key} = {shown(value)} is not a boolean.")
        return value

    def expect(self, key: str, expected: str) -> None:
        """Raise ``UnsupportedModelError`` unless ``key`` is ``expected``."""
        value = self._required(key, None)
        if value != expected:
            raise self.unsupported(key, f"only {expected!r} is")

    def unsupported(self, key: str, hint: str = "") -> UnsupportedModelError:
        """The error that refuses ``key`` at its present value."""
        detail = f" ({hint})" if hint else ""
        return UnsupportedModelError(
            f"{self.where}: {key} = {shown(self._values.get(key))} is not supported{detail}."
        )

    def refuse_unread(self) -> None:
        """Raise ``UnsupportedModelError`` for a key that was not read and is not known to be harmless."""
        for key, value in self._values.items():
            if key in self._read or key in HARMLESS_KEYS:
                continue
            neutral = NEUTRAL_VALUES.get(key, ())
            if not any(value == allowed and type(value) in _kinds(allowed) for allowed in neutral):
                raise self.unsupported(key)


def _kinds(allowed: object) -> tuple[type, ...]:
    """Types that may stand for ``allowed``: 1 and 1.0 are the same number, True is not one."""
    return (int, float) if type(allowed) is int else (type(allowed),)


def shown(value: object) -> str:
    """``value`` for an error message, cut to a sensible length."""
    try:
        text = repr(value)
    except RecursionError:
        return "<deeply nested>"
    return text if len(text) <= 80 else text[:77] + "..."
