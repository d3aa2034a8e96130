"""Presets are the published constants, and refuse a configuration that differs from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tee_runner.errors import ModelError
from tee_runner.models import load_model, parse_config
from tee_runner.models.presets import PRESETS, check_preset, preset_config

# As on the model cards and in config.json of the published models:
# layers, hidden, intermediate, heads, key/value heads, head size, vocabulary, theta.
PUBLISHED = {
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, 1e6),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, 1e6),
    "smollm2-135m-instruct": (30, 576, 1536, 9, 3, 64, 49152, 1e5),
    "gemma-3-270m": (18, 640, 2048, 4, 1, 256, 262144, 1e6),
    "gemma-4-e2b": (35, 1536, 6144, 8, 1, 256, 262144, 1e6),
    "gemma-4-e4b": (42, 2560, 10240, 8, 2, 256, 262144, 1e6),
}


@pytest.mark.parametrize("name", PRESETS)
def test_published_constants(name: str) -> None:
    config = preset_config(name)
    assert (
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.rope.theta,
    ) == PUBLISHED[name]
    assert config.tie_word_embeddings
    assert config.qk_norm == (not name.startswith("smollm2"))
    check_preset(name, config)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_hidden_layers", 35, "num_layers is 35, not 36"),
        ("intermediate_size", 9729, "intermediate_size is 9729, not 9728"),
        ("num_key_value_heads", 4, "num_kv_heads is 4, not 8"),
        ("rope_theta", 5_000_000, "theta=5000000.0"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope is"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps is 1e-05, not 1e-06"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False, not True"),
        ("attention_bias", True, "qkv_bias is True, not False"),
        ("max_position_embeddings", 262_144, "max_position_embeddings is 262144, not 40960"),
    ],
)
def test_every_difference_is_named(key: str, value: Any, named: str) -> None:
    changed = parse_config({**PRESETS["qwen3-4b"], key: value})
    with pytest.raises(ModelError, match="not that of qwen3-4b") as caught:
        check_preset("qwen3-4b", changed)
    assert named in caught.value.message


def test_another_family_is_refused() -> None:
    values = {**PRESETS["qwen3-4b"], "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with pytest.raises(ModelError, match=r"family is 'qwen2', not 'qwen3'.*qk_norm is False"):
        check_preset("qwen3-4b", parse_config(values))


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="no preset 'qwen3-5b'") as caught:
        preset_config("qwen3-5b")
    assert all(name in caught.value.remedy for name in PRESETS)


def test_a_preset_asked_for_by_name_is_checked_before_the_weights_are_opened(
    saved_model: Callable[..., tuple[Path, Any]],
) -> None:
    directory, _ = saved_model("qwen3")
    assert load_model(directory).config.num_layers == 3  # any other size is served from its own configuration
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="num_layers is 3, not 28"):
        load_model(directory, preset="qwen3-1.7b")
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 3
