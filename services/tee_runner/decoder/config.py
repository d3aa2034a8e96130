"""What the one forward pass needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Positions divided by ``factor`` (``rope_scaling`` type ``linear``)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1 frequency-dependent scaling (``rope_scaling`` type ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and an optional frequency scaling."""

    theta: float
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense pre-norm decoder with SwiGLU, GQA and RoPE.

    ``sliding_windows`` has one entry per layer: the number of positions a query sees, itself
    included, or None for full causal attention.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = field(default=())

    @property
    def q_dim(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.head_dim
