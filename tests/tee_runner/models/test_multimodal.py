"""Gemma 4 as it is published, beside encoders: its text part is the text model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import parse_config
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.gemma4 import PRESETS
from tee_runner.models.weights import load_weights

LOCAL, GLOBAL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24,
    "max_position_embeddings": 512, "sliding_window": 9, "layer_types": [LOCAL, GLOBAL] * 2,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
    "final_logit_softcapping": 5.0,
}  # fmt: skip
ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**ENCODER, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
AUDIO = {**ENCODER, "subsampling_conv_channels": [8, 4], "output_proj_dims": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Directories of a multimodal model and of a text model with its weights, and the former."""
    torch.manual_seed(3)
    whole = Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config={**TEXT},
            vision_config={**VISION, "position_embedding_size": 16},
            audio_config=AUDIO,
        )
    ).eval()
    text = Gemma4ForCausalLM(Gemma4TextConfig(**TEXT)).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    first, second = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("text")
    whole.save_pretrained(first)
    text.save_pretrained(second)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, text(ids).logits)
    return first, second, whole


def values_of(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return values


def test_the_text_part_is_the_text_model(models: tuple[Path, Path, Any]) -> None:
    first, second, _ = models
    config = parse_config(values_of(first))
    assert config == parse_config(values_of(second))
    whole, text = (load_weights(Checkpoint(directory), config) for directory in (first, second))
    for mine, theirs in zip(whole.linears(), text.linears(), strict=True):
        assert mine.name == theirs.name
        np.testing.assert_array_equal(mine.load(), theirs.load())
    assert whole.ple is not None
    assert text.ple is not None
    ids = np.arange(60)
    np.testing.assert_array_equal(whole.embed(ids), text.embed(ids))
    np.testing.assert_array_equal(whole.ple.gather(ids), text.ple.gather(ids))
    for left, right in zip(whole.layers, text.layers, strict=True):
        np.testing.assert_array_equal(left.input_norm, right.input_norm)


def test_weights_that_shared_layers_do_not_use_may_be_there(
    models: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    """Published checkpoints hold key and value projections of layers that read another's keys."""
    _, directory, _ = models
    tensors = load_file(directory / "model.safetensors")
    config = parse_config(values_of(directory))
    tensors["model.layers.3.self_attn.k_proj.weight"] = torch.zeros(48, 32)
    tensors["model.layers.3.self_attn.k_norm.weight"] = torch.zeros(24)
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(Checkpoint(tmp_path), config)
    tensors["model.layers.3.self_attn.k_proj.bias2"] = torch.zeros(48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="bias2"):
        load_weights(Checkpoint(tmp_path), config)
    del tensors["model.layers.3.self_attn.k_proj.bias2"], tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape("model.layers.1.self_attn.k_proj.weight")):
        load_weights(Checkpoint(tmp_path), config)


def test_a_tensor_under_two_names_is_refused(models: tuple[Path, Path, Any], tmp_path: Path) -> None:
    first, _, _ = models
    tensors = load_file(first / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' twice"):
        load_weights(Checkpoint(tmp_path), parse_config(values_of(first)))


def test_the_outer_configuration_is_read_strictly(models: tuple[Path, Path, Any]) -> None:
    first, _, _ = models
    values = values_of(first)
    for change, named in (
        ({"text_config": None}, "text_config"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"model_type": "gemma4_text"}, "model_type"),
        ({"adapter": "x"}, "adapter"),
        ({"text_config": {**values["text_config"], "adapter": 7}}, "text_config: adapter = 7"),
        ({"text_config": {**values["text_config"], "model_type": "gemma3_text"}}, "gemma3_text"),
        ({"text_config": {**values["text_config"], "enable_moe_block": True}}, "26B-A4B"),
    ):
        with pytest.raises(ModelError, match=named):
            parse_config({**values, **change})


def test_a_published_configuration_is_the_preset() -> None:
    preset = PRESETS["gemma-4-e2b"]
    values = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": {"model_type": "gemma4_audio"},
        "vision_config": {"model_type": "gemma4_vision"},
        "image_token_id": 258_880,
        "text_config": {key: value for key, value in preset.items() if key != "architectures"},
        "tie_word_embeddings": True,
    }
    assert parse_config(values) == parse_config(preset)
