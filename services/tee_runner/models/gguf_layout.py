"""What a GGUF file's metadata and tensor table say about the model, in Hugging Face terms.

Architectures ``llama``, ``qwen3`` and ``gemma3``. Metadata keys are those of
``gguf.constants.Keys``; what llama.cpp has built in rather than stored is written down here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.config_fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
)
from tee_runner.models.gguf_file import GgufFile
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.safetensors_file import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One ``general.architecture``.

    ``permuted`` says that llama.cpp interleaves the rows of the query and key projections;
    ``norm_offset`` is what it adds to the norm weights of the Hugging Face checkpoint.
    """

    hf_name: str
    model_type: str
    permuted: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(hf_name="LlamaForCausalLM", model_type="llama", permuted=True),
    "qwen3": Architecture(hf_name="Qwen3ForCausalLM", model_type="qwen3", qk_norm=True),
    "gemma3": Architecture(
        hf_name="Gemma3ForCausalLM", model_type="gemma3_text", qk_norm=True, post_norms=True, norm_offset=1.0
    ),
}

# Keys below "<architecture>." that describe the file and do not change the computation.
_HARMLESS_KEYS: Final = frozenset({"vocab_size"})

# The only parameters Llama 3.1 and 3.2 were published with, apart from the factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192

# What llama.cpp has built in for Gemma 3: every sixth layer is global, and the 27B model, known by
# its 62 layers, scales its queries by the mean head width instead of the head size.
_GEMMA3_PATTERN, _GEMMA3_LOCAL_THETA, _GEMMA3_27B_LAYERS = 6, 10_000.0, 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions and rotary embedding of the model, checked against hostile values."""

    architecture: Architecture
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    rope: dict[str, object]
    extra: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How one tensor of the model directory comes from one tensor of the GGUF file.

    ``offset`` is added to the values; ``unpermute_heads`` heads of rows are put back in order.
    """

    source: str
    shape: tuple[int, ...]
    unpermute_heads: int | None = None
    offset: float = 0.0


def read_shape(file: GgufFile, metadata: GgufMetadata) -> Shape:
    """Dimensions from the metadata, of which every key below the architecture must be understood.

    Raises ``UnsupportedModelError`` for an architecture, a key or a value that is not implemented,
    and ``ModelError`` for one that is missing or out of bounds.
    """
    name = metadata.string("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModelError(
            f"GGUF general.architecture = {name!r} is not supported (one of {', '.join(ARCHITECTURES)} is)."
        )

    def key(suffix: str) -> str:
        return f"{name}.{suffix}"

    hidden = metadata.integer(key("embedding_length"), low=1, high=MAX_WIDTH)
    heads = metadata.integer(key("attention.head_count"), low=1, high=MAX_HEADS)
    kv_heads = metadata.integer(key("attention.head_count_kv"), low=1, high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads are not divisible among {kv_heads} key-value heads.")
    head_dim = metadata.optional_integer(key("attention.key_length"), low=2, high=MAX_WIDTH)
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"The hidden size {hidden} is not divisible among {heads} heads.")
        head_dim = hidden // heads
    for suffix in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(key(suffix), low=1, high=MAX_WIDTH, default=head_dim)
        if value != head_dim:
            raise UnsupportedModelError(
                f"GGUF {key(suffix)} = {value} differs from the head size {head_dim}, which is not supported."
            )
    layers = metadata.integer(key("block_count"), low=1, high=MAX_LAYERS)
    rope = _rope(file, metadata, name, head_dim)
    extra: dict[str, object] = {}
    if name == "gemma3":
        rope, extra = _gemma3(metadata, rope, layers=layers, hidden=hidden, heads=heads, head_dim=head_dim)
    shape = Shape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=metadata.integer(key("feed_forward_length"), low=1, high=MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=metadata.integer(key("context_length"), low=1, high=MAX_CONTEXT),
        eps=_shortest(metadata.number(key("attention.layer_norm_rms_epsilon"), low=1e-12, high=1.0)),
        rope=rope,
        extra=extra,
    )
    _refuse_unknown_keys(metadata, name)
    return shape


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: the number the GGUF writer was given."""
    return float(str(np.float32(value)))


def _refuse_unknown_keys(metadata: GgufMetadata, architecture: str) -> None:
    """Every key of the architecture must have been understood: an ignored one may change results."""
    prefix = f"{architecture}."
    for name in metadata.names():
        if not name.startswith(prefix) or name in metadata.used:
            continue
        if name.removeprefix(prefix) not in _HARMLESS_KEYS:
            raise UnsupportedModelError(f"GGUF metadata key {name!r} is not supported.")


def _rope(file: GgufFile, metadata: GgufMetadata, architecture: str, head_dim: int) -> dict[str, object]:
    """``rope_parameters`` as Hugging Face writes them."""
    theta = _shortest(
        metadata.number(f"{architecture}.rope.freq_base", low=1.01, high=1e12, default=10_000.0)
    )
    factor = _linear_factor(metadata, architecture)
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta=theta, head_dim=head_dim, linear=factor is not None)
    if factor is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _linear_factor(metadata: GgufMetadata, architecture: str) -> float | None:
    kind = metadata.string(f"{architecture}.rope.scaling.type", default="none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModelError(f"GGUF {architecture}.rope.scaling.type = {kind!r} is not supported.")
    return _shortest(metadata.number(f"{architecture}.rope.scaling.factor", low=1e-3, high=1e6))


def _llama3_rope(file: GgufFile, *, theta: float, head_dim: int, linear: bool) -> dict[str, object]:
    refusal = UnsupportedModelError("GGUF tensor 'rope_freqs.weight' is not a Llama 3 frequency scaling.")
    if linear or file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
        raise refusal
    factors = file.read("rope_freqs.weight").astype(np.float64)
    factor = _shortest(float(factors.max()))
    if not math.isfinite(factor) or factor < 1.0:
        raise refusal
    if not np.allclose(factors, _llama3_divisors(theta, head_dim, factor), rtol=1e-5, atol=0.0):
        raise refusal
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> Array:
    """What llama.cpp stores for a Llama 3 scaling: the divisor of each frequency, ``(head_dim // 2,)``."""
    wavelength = 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    divisors = 1.0 / ((1.0 - smooth) / factor + smooth)
    divisors = np.where(wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH, 1.0, divisors)
    return np.where(wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW, factor, divisors)


def _gemma3(
    metadata: GgufMetadata, rope: dict[str, object], *, layers: int, hidden: int, heads: int, head_dim: int
) -> tuple[dict[str, object], dict[str, object]]:
    """``rope_parameters`` by type of layer, and the keys of ``config.json`` that only Gemma 3 has."""
    pattern = metadata.integer(
        "gemma3.attention.sliding_window_pattern", low=1, high=MAX_LAYERS, default=_GEMMA3_PATTERN
    )
    local = metadata.number("gemma3.rope.freq_base_swa", low=1.01, high=1e12, default=_GEMMA3_LOCAL_THETA)
    extra: dict[str, object] = {
        "sliding_window": metadata.integer("gemma3.attention.sliding_window", low=1, high=MAX_CONTEXT),
        "layer_types": [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
        ],
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
    }
    if (softcap := "gemma3.final_logit_softcapping") in metadata:
        extra["final_logit_softcapping"] = _shortest(metadata.number(softcap, low=1e-3, high=1e6))
    per_type: dict[str, object] = {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": _shortest(local)},
    }
    return per_type, extra


def plan_tensors(file: GgufFile, shape: Shape, vocab: int) -> tuple[dict[str, TensorPlan], bool]:
    """Target name to source for every tensor, and whether the head is tied to the embedding.

    Raises ``ModelError`` for a tensor that is missing or misshapen, ``UnsupportedModelError`` for
    one that is not expected.
    """
    if vocab > MAX_VOCAB:
        raise ModelError(f"The GGUF vocabulary has {vocab} tokens (limit {MAX_VOCAB}).")
    plan = {"model.embed_tokens.weight": TensorPlan(source="token_embd.weight", shape=(vocab, shape.hidden))}
    for i in range(shape.layers):
        plan |= _plan_layer(shape, i)
    offset = -shape.architecture.norm_offset
    plan["model.norm.weight"] = TensorPlan(source="output_norm.weight", shape=(shape.hidden,), offset=offset)
    tied = "output.weight" not in file.tensors
    if not tied:
        plan["lm_head.weight"] = TensorPlan(source="output.weight", shape=(vocab, shape.hidden))

    for tensor in plan.values():
        entry = file.tensors.get(tensor.source)
        if entry is None:
            raise ModelError(f"The GGUF file lacks the tensor {tensor.source!r}.")
        if entry.shape != tensor.shape:
            raise ModelError(f"GGUF tensor {tensor.source!r} has shape {entry.shape}, not {tensor.shape}.")
    unknown = set(file.tensors) - {tensor.source for tensor in plan.values()} - {"rope_freqs.weight"}
    if unknown:
        raise UnsupportedModelError(f"GGUF tensor {min(unknown)!r} is not supported.")
    return plan, tied


def _plan_layer(shape: Shape, index: int) -> dict[str, TensorPlan]:
    architecture, hidden, inter = shape.architecture, shape.hidden, shape.intermediate
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = {"input_layernorm": ("attn_norm", hidden)}
    if architecture.post_norms:
        norms["post_attention_layernorm"] = ("post_attention_norm", hidden)
        norms["pre_feedforward_layernorm"] = ("ffn_norm", hidden)
        norms["post_feedforward_layernorm"] = ("post_ffw_norm", hidden)
    else:
        norms["post_attention_layernorm"] = ("ffn_norm", hidden)
    if architecture.qk_norm:
        norms["self_attn.q_norm"] = ("attn_q_norm", shape.head_dim)
        norms["self_attn.k_norm"] = ("attn_k_norm", shape.head_dim)
    matrices: dict[str, tuple[str, tuple[int, int], int | None]] = {
        "self_attn.q_proj": ("attn_q", (q_dim, hidden), shape.heads),
        "self_attn.k_proj": ("attn_k", (kv_dim, hidden), shape.kv_heads),
        "self_attn.v_proj": ("attn_v", (kv_dim, hidden), None),
        "self_attn.o_proj": ("attn_output", (hidden, q_dim), None),
        "mlp.gate_proj": ("ffn_gate", (inter, hidden), None),
        "mlp.up_proj": ("ffn_up", (inter, hidden), None),
        "mlp.down_proj": ("ffn_down", (hidden, inter), None),
    }
    plan: dict[str, TensorPlan] = {}
    for target, (source, width) in norms.items():
        plan[f"model.layers.{index}.{target}.weight"] = TensorPlan(
            source=f"blk.{index}.{source}.weight", shape=(width,), offset=-architecture.norm_offset
        )
    for target, (source, dims, heads) in matrices.items():
        plan[f"model.layers.{index}.{target}.weight"] = TensorPlan(
            source=f"blk.{index}.{source}.weight",
            shape=dims,
            unpermute_heads=heads if architecture.permuted else None,
        )
    return plan
