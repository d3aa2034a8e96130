"""Small models of every family, made by transformers, and the default model's GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tee_runner.models.pull import fetch_gguf
from tee_runner.models.registry import DEFAULT_MODEL, KNOWN_MODELS

SPECIALS = ["<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
VOCAB = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in MERGES), *SPECIALS]

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def small_model(family: str, **overrides: Any) -> Any:
    """A random float32 transformers model with every norm and bias away from its initial value."""
    config_class, model_class = CLASSES[family]
    settings: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": len(VOCAB) - 2,
        "eos_token_id": len(VOCAB) - 1,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    model = model_class(config_class(**settings | overrides)).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    return model


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE with a handful of merges."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(VOCAB)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tokenizer


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the default model is imported from."""
    return fetch_gguf(KNOWN_MODELS[DEFAULT_MODEL], tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def saved_model(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Save a small model and its tokenizer; gives the directory and the model."""

    def save(family: str, *, shard_size: str = "1GB", **overrides: Any) -> tuple[Path, Any]:
        model = small_model(family, **overrides)
        directory = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(directory, max_shard_size=shard_size)
        small_tokenizer().save(str(directory / "tokenizer.json"))
        return directory, model

    return save
