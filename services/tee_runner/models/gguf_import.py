"""Import a GGUF file as a model directory in the Hugging Face layout.

Weights are dequantised, llama.cpp's row permutation of the query and key projections is undone,
and configuration and tokenizer are rebuilt from the metadata. Whatever the metadata say that this
decoder does not implement is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

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
from tee_runner.models.gguf_tokenizer import ImportedTokenizer, build_tokenizer
from tee_runner.models.half import to_float16
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.safetensors_file import DTYPES, Array, TensorSource, write_safetensors

TargetDtype = Literal["float16", "float32"]

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys below "<architecture>." that describe the file and do not change the computation.
_HARMLESS_KEYS: Final = frozenset({"vocab_size"})

# The only parameters Llama 3.1 and 3.2 were published with, apart from the factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Dimensions of the model, checked against hostile values."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    theta: float
    linear_factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """How one tensor of the directory comes from one tensor of the GGUF file."""

    source: str
    shape: tuple[int, ...]
    unpermute_heads: int | None = None


def import_gguf(
    path: Path, destination: Path, *, dtype: TargetDtype = "float16", progress: Progress = no_progress
) -> Path:
    """Write the model in the GGUF file ``path`` as the new directory ``destination``.

    Architectures ``llama`` and ``qwen3``. Matrices are stored as ``dtype``, vectors as float32. The
    directory appears whole or not at all: it is written beside its destination and renamed.

    Raises ``ModelError`` for a malformed file, a weight beyond the range of ``dtype``, or a
    destination that exists; ``UnsupportedModelError`` for anything this decoder does not implement.
    """
    if dtype not in ("float16", "float32"):
        raise ModelError(f"Cannot import as {dtype!r}.", remedy="Choose float16 or float32.")
    if destination.exists():
        raise ModelError(f"{destination} exists already.", remedy="Remove it or choose another directory.")
    file = GgufFile(path)
    metadata = GgufMetadata(file.metadata)
    shape = _read_shape(metadata)
    tokenizer = build_tokenizer(metadata, context_length=shape.context)
    plan, tied = _plan_tensors(file, shape, tokenizer.vocab_size)
    rope = _rope_parameters(file, shape)
    _refuse_unknown_keys(metadata, shape.architecture)
    config = _config(shape, tokenizer, dtype=dtype, tied=tied, rope=rope)

    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(
        tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.", suffix=".partial")
    )
    try:
        _write_text_files(partial, config, tokenizer)
        write_safetensors(
            partial / "model.safetensors",
            _sources(file, plan, dtype),
            progress=lambda done, total: progress("import", done, total),
        )
        partial.chmod(0o755)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def _read_shape(metadata: GgufMetadata) -> _Shape:
    architecture = metadata.string("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF general.architecture = {architecture!r} is not supported "
            f"(one of {', '.join(_ARCHITECTURES)} is)."
        )

    def key(name: str) -> str:
        return f"{architecture}.{name}"

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
    for name in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(key(name), low=1, high=MAX_WIDTH, default=head_dim)
        if value != head_dim:
            raise UnsupportedModelError(
                f"GGUF {key(name)} = {value} differs from the head size {head_dim}, which is not supported."
            )
    return _Shape(
        architecture=architecture,
        layers=metadata.integer(key("block_count"), low=1, high=MAX_LAYERS),
        hidden=hidden,
        intermediate=metadata.integer(key("feed_forward_length"), low=1, high=MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=metadata.integer(key("context_length"), low=1, high=MAX_CONTEXT),
        eps=_shortest(metadata.number(key("attention.layer_norm_rms_epsilon"), low=1e-12, high=1.0)),
        theta=_shortest(metadata.number(key("rope.freq_base"), low=1.0, high=1e12, default=10_000.0)),
        linear_factor=_linear_factor(metadata, architecture),
    )


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: the number the GGUF writer was given."""
    return float(str(np.float32(value)))


def _linear_factor(metadata: GgufMetadata, architecture: str) -> float | None:
    kind = metadata.string(f"{architecture}.rope.scaling.type", default="none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModelError(f"GGUF {architecture}.rope.scaling.type = {kind!r} is not supported.")
    return _shortest(metadata.number(f"{architecture}.rope.scaling.factor", low=1e-3, high=1e6))


def _refuse_unknown_keys(metadata: GgufMetadata, architecture: str) -> None:
    """Every key of the architecture must have been understood: an ignored one may change results."""
    prefix = f"{architecture}."
    for name in metadata.names():
        if not name.startswith(prefix) or name in metadata.used:
            continue
        if name.removeprefix(prefix) not in _HARMLESS_KEYS:
            raise UnsupportedModelError(f"GGUF metadata key {name!r} is not supported.")


def _plan_tensors(file: GgufFile, shape: _Shape, vocab: int) -> tuple[dict[str, _Tensor], bool]:
    """Target name to source for every tensor, and whether the head is tied to the embedding."""
    if vocab > MAX_VOCAB:
        raise ModelError(f"The GGUF vocabulary has {vocab} tokens (limit {MAX_VOCAB}).")
    hidden, inter = shape.hidden, shape.intermediate
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    permuted = shape.architecture == "llama"
    plan = {"model.embed_tokens.weight": _Tensor(source="token_embd.weight", shape=(vocab, hidden))}
    for i in range(shape.layers):
        parts: list[tuple[str, str, tuple[int, ...], int | None]] = [
            ("input_layernorm", "attn_norm", (hidden,), None),
            ("self_attn.q_proj", "attn_q", (q_dim, hidden), shape.heads if permuted else None),
            ("self_attn.k_proj", "attn_k", (kv_dim, hidden), shape.kv_heads if permuted else None),
            ("self_attn.v_proj", "attn_v", (kv_dim, hidden), None),
            ("self_attn.o_proj", "attn_output", (hidden, q_dim), None),
            ("post_attention_layernorm", "ffn_norm", (hidden,), None),
            ("mlp.gate_proj", "ffn_gate", (inter, hidden), None),
            ("mlp.up_proj", "ffn_up", (inter, hidden), None),
            ("mlp.down_proj", "ffn_down", (hidden, inter), None),
        ]
        if shape.architecture == "qwen3":
            parts.append(("self_attn.q_norm", "attn_q_norm", (shape.head_dim,), None))
            parts.append(("self_attn.k_norm", "attn_k_norm", (shape.head_dim,), None))
        for target, source, dims, heads in parts:
            plan[f"model.layers.{i}.{target}.weight"] = _Tensor(
                source=f"blk.{i}.{source}.weight", shape=dims, unpermute_heads=heads
            )
    plan["model.norm.weight"] = _Tensor(source="output_norm.weight", shape=(hidden,))
    tied = "output.weight" not in file.tensors
    if not tied:
        plan["lm_head.weight"] = _Tensor(source="output.weight", shape=(vocab, hidden))

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


def _rope_parameters(file: GgufFile, shape: _Shape) -> dict[str, object]:
    if "rope_freqs.weight" not in file.tensors:
        if shape.linear_factor is None:
            return {"rope_type": "default", "rope_theta": shape.theta}
        return {"rope_type": "linear", "rope_theta": shape.theta, "factor": shape.linear_factor}
    refusal = UnsupportedModelError("GGUF tensor 'rope_freqs.weight' is not a Llama 3 frequency scaling.")
    if shape.linear_factor is not None or file.tensors["rope_freqs.weight"].shape != (shape.head_dim // 2,):
        raise refusal
    factors = file.read("rope_freqs.weight").astype(np.float64)
    factor = _shortest(float(factors.max()))
    if not math.isfinite(factor) or factor < 1.0:
        raise refusal
    expected = _llama3_divisors(shape.theta, shape.head_dim, factor)
    if not np.allclose(factors, expected, rtol=1e-5, atol=0.0):
        raise refusal
    return {
        "rope_type": "llama3",
        "rope_theta": shape.theta,
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


def _sources(file: GgufFile, plan: dict[str, _Tensor], dtype: TargetDtype) -> dict[str, TensorSource]:
    matrix = "F16" if dtype == "float16" else "F32"

    def loader(name: str, tensor: _Tensor, stored: str) -> Callable[[], Array]:
        def load() -> Array:
            values: Array = file.read(tensor.source)
            if not np.isfinite(values).all():
                raise ModelError(f"GGUF tensor {tensor.source!r} holds values that are not finite.")
            if tensor.unpermute_heads is not None:
                values = _unpermute(values, tensor.unpermute_heads)
            return to_float16(values, name=name) if stored == "F16" else values.astype(DTYPES["F32"])

        return load

    sources: dict[str, TensorSource] = {}
    for name, tensor in plan.items():
        stored = matrix if len(tensor.shape) == 2 else "F32"
        sources[name] = TensorSource(stored, tensor.shape, loader(name, tensor, stored))
    return sources


def _unpermute(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's interleaving of rotary pairs within each head: ``(heads * d, d_in)``."""
    rows, d_in = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, d_in).swapaxes(1, 2).reshape(rows, d_in)


def _config(
    shape: _Shape, tokenizer: ImportedTokenizer, *, dtype: TargetDtype, tied: bool, rope: dict[str, object]
) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[shape.architecture]],
        "model_type": shape.architecture,
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    if shape.architecture == "llama":
        config["mlp_bias"] = False
    return {key: value for key, value in config.items() if value is not None}


def _write_text_files(directory: Path, config: dict[str, object], tokenizer: ImportedTokenizer) -> None:
    generation = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    texts = {
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "tokenizer.json": tokenizer.tokenizer_json,
        "tokenizer_config.json": json.dumps(tokenizer.tokenizer_config, indent=2, ensure_ascii=False) + "\n",
    }
    if tokenizer.chat_template is not None:
        texts["chat_template.jinja"] = tokenizer.chat_template
    for name, text in texts.items():
        with (directory / name).open("x", encoding="utf-8", newline="") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
