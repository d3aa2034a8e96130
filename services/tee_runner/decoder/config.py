"""What the one forward pass needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


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
class ProportionalRope:
    """Only the leading angles of a head rotate (type ``proportional``, Gemma 4).

    Of the ``head_dim / 2`` angles the first ``int(partial_rotary_factor * head_dim // 2)`` have
    the frequencies of the whole head, divided by ``factor``; the others are zero.
    """

    partial_rotary_factor: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (``rope_scaling`` type ``yarn``; Peng et al. 2023, section 3).

    Angles that turn more than ``beta_fast`` times within ``original_max_position_embeddings`` are
    kept, those that turn less than ``beta_slow`` times are divided by ``factor``, with a ramp
    between, whose ends are whole angle indices when ``truncate`` is set. Cosines and sines are
    multiplied by ``attention_factor``, which scales the attention scores by its square.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | ProportionalRope


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and an optional frequency scaling."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The shape of one layer.

    ``window`` is the number of positions a query sees, itself included, or None for full causal
    attention. ``kv_source`` names an earlier layer whose keys and values this one reads; it then
    projects queries only. With ``k_eq_v`` the values are the key projection, taken before the key
    norm and the rotation. The rows of the merged ``qkv`` weight are thus the query heads, then the
    key heads, then the value heads, each part only where the layer has it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
    window: int | None = None
    kv_source: int | None = None
    k_eq_v: bool = False

    @property
    def q_dim(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        """Rows of the merged ``qkv`` weight."""
        parts = 0 if self.kv_source is not None else 1 if self.k_eq_v else 2
        return self.q_dim + parts * self.kv_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense pre-norm decoder with a gated MLP, GQA and RoPE.

    ``layers`` has one entry per layer, or none when all layers have the sizes given here; then
    ``sliding_windows`` may give each its window. :meth:`layer` answers for both.

    Attributes:
        activation: of the gate: SiLU, or GELU in its tanh approximation.
        embed_scale: factor on the embedding rows; ``DecoderWeights.embed`` applies it.
        norm_offset: added to every stored norm weight when it is read (Gemma 3 stores w - 1).
        query_scale: factor on the attention scores; None for 1/√head_dim.
        attn_logit_softcap: c in c·tanh(score/c), None for none; likewise ``final_logit_softcap``
            on the logits.
        post_norms: what attention and MLP return is normalised before it joins the residual.
        value_norm: value heads are divided by their root mean square (no weight).
        layer_scalar: each layer ends with ``rows *= LayerWeights.output_scale``.
        per_layer_input_width: width of the per-layer embeddings (PLE), 0 for none.
        per_layer_vocab_size: rows of their table.
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
    layers: tuple[LayerConfig, ...] = field(default=())
    activation: Activation = "silu"
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    query_scale: float | None = None
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    post_norms: bool = False
    value_norm: bool = False
    layer_scalar: bool = False
    per_layer_input_width: int = 0
    per_layer_vocab_size: int = 0

    @property
    def q_dim(self) -> int:
        """Width of all query heads side by side, in a model whose layers are alike."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads side by side, in a model whose layers are alike."""
        return self.num_kv_heads * self.head_dim

    def layer(self, index: int) -> LayerConfig:
        """The shape of layer ``index``. Raises ``IndexError`` when there is none."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"There is no layer {index} of {self.num_layers}.")
        if self.layers:
            return self.layers[index]
        return LayerConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope=self.rope,
            window=self.sliding_windows[index] if self.sliding_windows else None,
        )
