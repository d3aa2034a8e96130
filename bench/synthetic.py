"""Models of a given shape with random weights, for benchmarks that need a shape and no text."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.weights import DecoderWeights, LayerWeights, LinearSpec
from tee_runner.models.loader import LoadedModel
from tee_runner.models.tokenizer import Tokenizer


def qwen3_4b_shape(layers: int, *, vocab: int = 151_936) -> DecoderConfig:
    """Qwen3-4B's published shape with fewer layers."""
    return DecoderConfig(
        family="qwen3",
        num_layers=layers,
        hidden_size=2560,
        intermediate_size=9728,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=True,
        qk_norm=True,
        sliding_windows=(None,) * layers,
    )


def random_model(config: DecoderConfig, *, seed: int = 0) -> LoadedModel:
    """A model of that shape; its tokenizer must not be used."""
    generator = np.random.default_rng(seed)

    def linear(name: str, d_in: int, d_out: int) -> LinearSpec:
        weight = (generator.standard_normal((d_out, d_in), dtype=np.float32) / np.sqrt(d_in)).astype(
            np.float16
        )
        return LinearSpec(name=name, d_in=d_in, d_out=d_out, load=lambda: weight)

    ones = np.ones(config.hidden_size, dtype=np.float32)
    head_ones = np.ones(config.head_dim, dtype=np.float32)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            post_attention_norm=ones,
            q_norm=head_ones,
            k_norm=head_ones,
            qkv=linear(f"layers.{i}.qkv", config.hidden_size, config.q_dim + 2 * config.kv_dim),
            o=linear(f"layers.{i}.o", config.q_dim, config.hidden_size),
            gate_up=linear(f"layers.{i}.gate_up", config.hidden_size, 2 * config.intermediate_size),
            down=linear(f"layers.{i}.down", config.intermediate_size, config.hidden_size),
        )
        for i in range(config.num_layers)
    )
    head = linear("lm_head", config.hidden_size, config.vocab_size)
    table = head.load()

    def embed(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return table[ids].astype(np.float32)

    weights = DecoderWeights(embed=embed, layers=layers, final_norm=ones, lm_head=head)
    return LoadedModel(
        directory=Path("synthetic"),
        config=config,
        weights=weights,
        tokenizer=cast(Tokenizer, None),
        eos_ids=frozenset(),
        identity=bytes(32),
    )
