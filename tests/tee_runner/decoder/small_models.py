"""Random transformers models with float16 weights, saved and opened, and ways to run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tee_runner.decoder.forward import Decoder, LinearHandles, RaggedBatch
from tee_runner.decoder.kv_cache import KvCache, KvDtype
from tee_runner.models import LoadedModel, load_model
from tee_runner.protection.base import ForwardSession, Linear, Protection
from tests.tee_runner.protection.doubles import ExactTransport, Float32, protect

VOCAB, MAX_LEN = 300, 192
# Factors on transformers' initial weights (deviation 0.02, 64 inputs). With the strong one a
# projection keeps 0.8 of a norm: attention is far from uniform and every part of a layer matters.
# With the mild one it keeps 0.4, so that an error made in one offload shrinks in the next.
STRONG, MILD = 5.0, 2.5

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA3_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
}

# Name, classes, and what differs from the common settings.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "head_dim": 40}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 4, "head_dim": 16}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "head_dim": 16},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 11}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 9,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "query_pre_attn_scalar": 24,
            "rope_parameters": GEMMA3_ROPES,
            "tie_word_embeddings": True,
        },
    ),
    # One key/value head, heads wider than their share, a cap on the logits.
    "gemma3-mqa": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 9,
            "layer_types": [LOCAL, LOCAL, GLOBAL],
            "num_key_value_heads": 1,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    # As E2B: per-layer embeddings, the last layers read keys of both kinds and are twice as wide.
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "num_hidden_layers": 5,
            "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "global_head_dim": 48,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    # As 31B: values are the global layers' key projection, nothing is shared, no per-layer embeddings.
    "gemma4-kv": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "layer_types": [LOCAL, GLOBAL, GLOBAL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
        },
    ),
}


class ExactSession(ForwardSession):
    """Products in float64, rounded once: what is left is the decoder's own arithmetic."""

    def __init__(self, weights: Sequence[NDArray[np.float64]]) -> None:
        self._weights = weights

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        assert sum(counts) == len(rows)
        out[:] = rows.astype(np.float64) @ self._weights[weight.weight_id].T


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A transformers model and the same weights in the runner."""

    theirs: Any
    ours: LoadedModel
    weights: list[NDArray[np.float16]]
    exact: list[NDArray[np.float64]]
    linears: tuple[Linear, ...]

    def decoder(self) -> Decoder:
        handles = LinearHandles(handles=self.linears)
        return Decoder(self.ours.config, self.ours.weights, handles, max_len=MAX_LEN)

    def cache(self, slots: int = 4, dtype: KvDtype = "float32", longest_chunk: int | None = None) -> KvCache:
        return KvCache(
            self.ours.config, slots=slots, max_len=MAX_LEN, dtype=dtype, longest_chunk=longest_chunk
        )

    def session(self) -> ForwardSession:
        return ExactSession(self.exact)

    def protection(self, kind: type[Protection]) -> Protection:
        return protect(kind, ExactTransport(self.weights, keep=False))

    def reference(self, tokens: Sequence[int]) -> Float32:
        """transformers' logits ``(n, vocab)``."""
        with torch.no_grad():
            logits: Float32 = self.theirs(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
        return logits


def make(name: str, gain: float, directory: Path, **sizes: int) -> SmallModel:
    """Build, scale by ``gain``, round to float16, save and open the model called ``name``.

    ``sizes`` stand in for the common settings.
    """
    config_class, model_class, overrides = FAMILIES[name]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,  # else its embedding is zero, and what is normalised is noise
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    settings |= overrides | sizes
    if config_class is Qwen2Config:
        del settings["head_dim"]  # its attention takes hidden_size / heads
    torch.manual_seed(sum(name.encode()))
    theirs = model_class(config_class(**settings)).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_((parameter * gain).half().float())
        if name.startswith("gemma"):
            _finish_gemma(theirs, keep=(8 * 0.02 * gain) ** 2)
    theirs.save_pretrained(directory)
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    ours = load_model(directory)
    specs = list(ours.weights.linears())
    weights = [spec.load() for spec in specs]
    return SmallModel(
        theirs=theirs,
        ours=ours,
        weights=weights,
        exact=[weight.astype(np.float64) for weight in weights],
        linears=tuple(
            Linear(weight_id=i, name=spec.name, d_in=spec.d_in, d_out=spec.d_out)
            for i, spec in enumerate(specs)
        ),
    )


def _finish_gemma(theirs: Any, *, keep: float) -> None:
    """What ``gain`` cannot reach, because it is normalised, and what initial values leave out.

    Post-norms keep ``keep`` of a norm, as the two projections of a block do elsewhere. Gemma 4 does not scale
    scores by 1/√head_dim: that is left to its query norms. Its layer scalars leave 1, and its
    table of per-layer embeddings becomes one that int8 holds exactly.
    """
    offset = 1.0 if isinstance(theirs, Gemma3ForCausalLM) else 0.0
    for layer in theirs.model.layers:
        for part in ("attention_layernorm", "feedforward_layernorm", "per_layer_input_norm"):
            if (norm := getattr(layer, f"post_{part}", None)) is not None:
                norm.weight.copy_((norm.weight + offset) * keep - offset)
        if isinstance(theirs, Gemma4ForCausalLM):
            layer.self_attn.q_norm.weight.mul_(layer.self_attn.head_dim**-0.5)
            layer.layer_scalar.uniform_(0.5, 1.2)
    if getattr(theirs.config, "hidden_size_per_layer_input", 0):
        table = theirs.model.embed_tokens_per_layer.weight
        parts = table.reshape(VOCAB, theirs.config.num_hidden_layers, -1)
        scales = parts.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
        table.copy_(((parts / scales).round() * scales).reshape(table.shape))


def tokens_of(seed: int, count: int) -> list[int]:
    """``count`` random token ids."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def batch_of(parts: Iterable[tuple[int, Sequence[int], int]]) -> RaggedBatch:
    """A batch from (slot, tokens, rows to sample) of each sequence."""
    listed = list(parts)
    return RaggedBatch(
        tokens=np.concatenate([np.array(tokens, np.int64) for _, tokens, _ in listed]),
        slots=[slot for slot, _, _ in listed],
        counts=[len(tokens) for _, tokens, _ in listed],
        sampled=[sampled for _, _, sampled in listed],
    )


def distance(ours: Float32, theirs: Float32) -> float:
    """The largest relative L2 error of a row of logits."""
    assert ours.shape == theirs.shape
    return float(np.max(np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)))
