"""What the configurations of all supported families share: dimensions and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tee_runner.decoder.config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ProportionalRope,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
)
from tee_runner.errors import ModelError
from tee_runner.models.config_fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigReader,
    shown,
)

_MAX_FACTOR: Final = 1e6
_MSCALES: Final = ("mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a dense decoder, named as in ``DecoderConfig``."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float


def read_dimensions(
    reader: ConfigReader,
    *,
    head_dim_required: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> Dimensions:
    """Sizes and epsilon, bounded and mutually consistent; ``activation`` is a key and its only value.

    Raises ``ModelError`` naming the key.
    """
    reader.expect(*activation)
    hidden = reader.integer("hidden_size", high=MAX_WIDTH)
    heads = reader.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = reader.integer("num_key_value_heads", high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads = {heads} is not divisible "
            f"by num_key_value_heads = {kv_heads}."
        )
    if "head_dim" not in reader and not head_dim_required and hidden % heads:
        raise ModelError(
            f"config.json: hidden_size = {hidden} is not divisible by num_attention_heads = {heads}."
        )
    default = None if head_dim_required else hidden // heads
    head_dim = reader.integer("head_dim", low=0, high=MAX_WIDTH, default=default)
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"config.json: the head size {head_dim} is not a positive even number.")
    return Dimensions(
        num_layers=reader.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", high=MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size", high=MAX_VOCAB),
        max_position_embeddings=reader.integer("max_position_embeddings", high=MAX_CONTEXT),
        rms_norm_eps=reader.number("rms_norm_eps", low=1e-12, high=1.0),
    )


def read_rope(reader: ConfigReader, *, default_theta: float | None = None) -> RopeConfig:
    """The rotary embedding, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``.

    Raises ``UnsupportedModelError`` for a type other than default, linear, llama3 and yarn, and
    ``ModelError`` for missing or contradictory values.
    """
    if "rope_parameters" in reader:
        if "rope_scaling" in reader:
            raise ModelError("config.json has both rope_parameters and rope_scaling.")
        fields = read_section(reader, "rope_parameters")
        theta = read_theta(fields, default_theta=default_theta)
        if reader.value("rope_theta") is not None and read_theta(reader) != theta:
            raise ModelError("config.json: rope_theta contradicts rope_parameters.")
    else:
        theta = read_theta(reader, default_theta=default_theta)
        if "rope_scaling" not in reader:
            return RopeConfig(theta=theta)
        fields = read_section(reader, "rope_scaling")
    return RopeConfig(theta=theta, scaling=read_rope_scaling(fields))


def read_rope_scaling(fields: ConfigReader, *, proportional: bool = False) -> RopeScaling | None:
    """The frequency scaling that a section describes, all of whose keys must be understood.

    ``proportional`` allows the type of that name. Raises as :func:`read_rope`.
    """
    key = "rope_type" if "rope_type" in fields else "type"
    kind = fields.value(key) or "default"
    if "rope_type" in fields and "type" in fields and fields.value("type") != kind:
        raise ModelError(f"{fields.where} has two types, {shown(fields.value('type'))} and {shown(kind)}.")
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearRopeScaling(factor=fields.number("factor", low=1.0, high=_MAX_FACTOR))
    elif kind == "llama3":
        scaling = _llama3(fields)
    elif kind == "proportional" and proportional:
        scaling = ProportionalRope(
            partial_rotary_factor=fields.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0),
            factor=fields.number("factor", low=1.0, high=_MAX_FACTOR, default=1.0),
        )
    elif kind == "yarn":
        scaling = _yarn(fields)
    elif kind != "default":
        raise fields.unsupported(key, "default, linear, llama3 and yarn are")
    fields.refuse_unread()
    return scaling


def read_section(reader: ConfigReader, key: str) -> ConfigReader:
    """The object ``key`` within ``reader``. Raises ``ModelError`` when it is none."""
    value = reader.value(key)
    if not isinstance(value, Mapping):
        raise ModelError(f"{reader.where}: {key} = {shown(value)} is not an object.")
    return ConfigReader(value, where=f"{reader.where} {key}")


def read_theta(fields: ConfigReader, *, default_theta: float | None = None) -> float:
    """The rotary base of a section. Raises ``ModelError`` when it is missing or out of bounds."""
    return fields.number("rope_theta", low=1.01, high=1e12, default=default_theta)


def _llama3(fields: ConfigReader) -> Llama3RopeScaling:
    low = fields.number("low_freq_factor", low=1e-3, high=_MAX_FACTOR)
    high = fields.number("high_freq_factor", low=1e-3, high=_MAX_FACTOR)
    if high <= low:
        raise ModelError(f"config.json: high_freq_factor = {high} does not exceed low_freq_factor = {low}.")
    return Llama3RopeScaling(
        factor=fields.number("factor", low=1.0, high=_MAX_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", high=MAX_CONTEXT),
    )


def _yarn(fields: ConfigReader) -> YarnRopeScaling:
    """YaRN with the defaults of transformers (``_compute_yarn_parameters``)."""
    factor = fields.number("factor", low=1.0, high=_MAX_FACTOR)
    fast = fields.number("beta_fast", low=1e-3, high=_MAX_FACTOR, default=32.0)
    slow = fields.number("beta_slow", low=1e-3, high=_MAX_FACTOR, default=1.0)
    if fast <= slow:
        raise ModelError(f"config.json: beta_fast = {fast} does not exceed beta_slow = {slow}.")
    mscales = [fields.number(key, low=0.0, high=100.0) if key in fields else 0.0 for key in _MSCALES]
    if "attention_factor" in fields:
        attention = fields.number("attention_factor", low=1e-3, high=100.0)
    elif all(mscales):
        attention = _yarn_attention(factor, mscales[0]) / _yarn_attention(factor, mscales[1])
    else:
        attention = _yarn_attention(factor)
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", high=MAX_CONTEXT),
        attention_factor=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncate=fields.boolean("truncate", default=True),
    )


def _yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """The attention factor of the YaRN paper, 0.1 · ln(factor) + 1 (equation 22), with its later weight."""
    return 0.1 * mscale * math.log(factor) + 1.0


def read_layer_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of the Qwen families, one entry per layer.

    ``layer_types`` decides where it is given, else layers from ``max_window_layers`` on slide.
    Raises ``ModelError`` for contradictions.
    """
    enabled = reader.boolean("use_sliding_window", default=False)
    reader.value("max_window_layers")
    reader.value("sliding_window")
    types = reader.value("layer_types")
    window = reader.integer("sliding_window", high=MAX_CONTEXT) if enabled else None
    if types is None:
        if not enabled:
            return (None,) * num_layers
        first = reader.integer("max_window_layers", low=0, high=MAX_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types = {shown(types)} does not name the {num_layers} layers.")
    windows: list[int | None] = []
    for kind in types:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and window is not None:
            windows.append(window)
        else:
            raise reader.unsupported("layer_types", f"{shown(kind)} with use_sliding_window = {enabled}")
    return tuple(windows)
