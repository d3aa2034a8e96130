"""What Gemma 3 and Gemma 4 share: local and global layers, each kind with its own rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tee_runner.decoder.config import RopeConfig, RopeScaling
from tee_runner.errors import ModelError
from tee_runner.models.config_fields import MAX_LAYERS, ConfigReader, shown
from tee_runner.models.dense import Dimensions, read_dimensions, read_rope_scaling, read_section, read_theta

LOCAL, GLOBAL = "sliding_attention", "full_attention"
LOCAL_THETA: Final = 10_000.0
GLOBAL_THETA: Final = 1_000_000.0
# Without layer_types, every sixth layer is global.
_PATTERN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ropes:
    """The rotary embedding of each kind of layer."""

    local: RopeConfig
    full: RopeConfig


def read_gemma_dimensions(reader: ConfigReader) -> Dimensions:
    """Sizes and epsilon; the activation must be GELU in its tanh form.

    Raises ``ModelError`` naming the key, and ``UnsupportedModelError`` for attention that is not
    causal.
    """
    if reader.value("use_bidirectional_attention") not in (None, False, "vision"):
        raise reader.unsupported("use_bidirectional_attention", "text must be read causally")
    return read_dimensions(
        reader, head_dim_required=True, activation=("hidden_activation", "gelu_pytorch_tanh")
    )


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """``LOCAL`` or ``GLOBAL`` for each layer.

    ``layer_types`` decides where it is given, else every n-th layer is global, n being
    ``sliding_window_pattern`` or 6. Raises ``ModelError`` for anything else.
    """
    types = reader.value("layer_types")
    pattern = reader.integer("sliding_window_pattern", high=MAX_LAYERS, default=_PATTERN)
    written = reader.integer("_sliding_window_pattern", high=MAX_LAYERS, default=pattern)
    if types is None:
        if written != pattern:
            raise reader.unsupported("_sliding_window_pattern", "without layer_types")
        return tuple(LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(
            f"{reader.where}: layer_types = {shown(types)} does not name the {num_layers} layers."
        )
    for kind in types:
        if kind not in (LOCAL, GLOBAL):
            raise reader.unsupported("layer_types", f"{shown(kind)} is not; {LOCAL} and {GLOBAL} are")
    return tuple(types)


def read_ropes(reader: ConfigReader, *, full_default: Mapping[str, Any] | None = None) -> Ropes:
    """``rope_parameters``, a section per kind of layer.

    Where it lacks the global section, ``full_default`` stands for it; without ``rope_parameters``
    the older keys ``rope_theta``, ``rope_scaling`` (both global) and ``rope_local_base_freq`` are
    read. Raises ``ModelError`` for missing or contradictory values and ``UnsupportedModelError``
    for a rotary embedding that is not implemented.
    """
    if reader.value("rope_parameters") is None:
        return _older_ropes(reader, full_default)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        if reader.value(key) is not None:
            raise ModelError(f"{reader.where} has both rope_parameters and {key}.")
    sections = read_section(reader, "rope_parameters")
    full = (
        read_section(sections, GLOBAL)
        if GLOBAL in sections
        else ConfigReader(full_default or {}, where=f"{sections.where} {GLOBAL}")
    )
    local = (
        read_section(sections, LOCAL)
        if LOCAL in sections
        else ConfigReader({}, where=f"{sections.where} {LOCAL}")
    )
    sections.refuse_unread()
    return Ropes(local=_rope(local, LOCAL_THETA), full=_rope(full, GLOBAL_THETA))


def _older_ropes(reader: ConfigReader, full_default: Mapping[str, Any] | None) -> Ropes:
    theta = read_theta(reader, default_theta=GLOBAL_THETA)
    local = reader.number("rope_local_base_freq", low=1.0, high=1e12, default=LOCAL_THETA)
    scaling: RopeScaling | None = None
    if "rope_scaling" in reader:
        scaling = read_rope_scaling(read_section(reader, "rope_scaling"))
    elif full_default is not None:
        fields = ConfigReader(full_default, where=f"{reader.where} {GLOBAL}")
        return Ropes(local=RopeConfig(theta=local), full=_rope(fields, theta))
    return Ropes(local=RopeConfig(theta=local), full=RopeConfig(theta=theta, scaling=scaling))


def _rope(fields: ConfigReader, default_theta: float) -> RopeConfig:
    theta = read_theta(fields, default_theta=default_theta)
    return RopeConfig(theta=theta, scaling=read_rope_scaling(fields, proportional=True))


def read_softcap(reader: ConfigReader, key: str) -> float | None:
    """A positive cap, or None. Raises ``ModelError`` for anything else."""
    return None if reader.value(key) is None else reader.number(key, low=1e-3, high=1e6)


def embed_scale(hidden_size: int) -> float:
    """What these families multiply embeddings by: √hidden_size."""
    return math.sqrt(hidden_size)
