"""Gemma 3 GGUF files: what llama.cpp adds to the norms and has built in is undone and spelled out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import import_gguf, load_model

from .conftest import MERGES, SPECIALS, VOCAB
from .gguf_files import NAMES, metadata_of, write

LAYERS = 7  # layer 5 is global
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=5,
        max_position_embeddings=512,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    made = Gemma3ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    return made


def tensors_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """As llama.cpp's converter writes them: 1 added to every norm."""
    result: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy() + np.float32(1.0) if name.endswith("norm.weight") else tensor.numpy()
        if name == "model.embed_tokens.weight":
            result["token_embd.weight"] = values
        elif name == "model.norm.weight":
            result["output_norm.weight"] = values
        elif name != "lm_head.weight":
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            result[f"blk.{layer}.{GEMMA_NAMES[part]}.weight"] = values
    return result


def gguf(model: Any, path: Path, **changes: Any) -> Path:
    config = model.config
    config_like = type(
        "Config", (), {**config.to_dict(), "model_type": "gemma3", "rope_parameters": {"rope_theta": 1e6}}
    )
    metadata = metadata_of(type("Model", (), {"config": config_like}), VOCAB, MERGES, len(SPECIALS))
    metadata |= {
        "gemma3.attention.sliding_window": config.sliding_window,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return write(path, "gemma3", {k: v for k, v in metadata.items() if v is not None}, tensors_of(model))


def test_logits_are_those_of_the_original(model: Any, tmp_path: Path) -> None:
    directory = import_gguf(gguf(model, tmp_path / "m.gguf"), tmp_path / "out", dtype="float32")
    imported = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([list(range(0, 262, 5))])
    with torch.no_grad():
        ours, theirs = imported(ids).logits, model(ids).logits
    # A norm is w + 1 - 1, rounded twice; everything else is the same.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    loaded = load_model(directory)
    assert [loaded.config.layer(i).window for i in range(LAYERS)] == [5, 5, 5, 5, 5, None, 5]
    assert loaded.config.query_scale == 32**-0.5
    assert loaded.config.norm_offset == 1.0


def test_what_llama_cpp_has_built_in_is_spelled_out(model: Any, tmp_path: Path) -> None:
    changes = {
        "gemma3__rope__freq_base_swa": 5000.0,
        "gemma3__attention__sliding_window_pattern": 3,
        "gemma3__final_logit_softcapping": 30.0,
    }
    directory = import_gguf(gguf(model, tmp_path / "m.gguf", **changes), tmp_path / "out")
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert config["rope_parameters"]["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 8.0,
    }
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [2, 5]
    assert config["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize(
    ("changes", "named", "error"),
    [
        ({"gemma3__attention__sliding_window": None}, "sliding_window", ModelError),
        ({"gemma3__attention__key_length_swa": 64}, "key_length_swa", UnsupportedModelError),
        ({"gemma3__attn_logit_softcapping": 50.0}, "attn_logit_softcapping", UnsupportedModelError),
        ({"gemma3__rope__scaling__type": "yarn"}, "yarn", UnsupportedModelError),
    ],
)
def test_other_keys_are_refused_by_name(
    changes: dict[str, Any], named: str, error: type[ModelError], model: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        import_gguf(gguf(model, tmp_path / "m.gguf", **changes), tmp_path / "out")
