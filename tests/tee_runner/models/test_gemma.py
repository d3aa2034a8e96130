"""Gemma 3 and 4 configurations: shapes are those of transformers, everything else refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from tee_runner.decoder.config import DecoderConfig, LinearRopeScaling, ProportionalRope, RopeConfig
from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import parse_config
from tee_runner.models.gemma4 import PRESETS
from tee_runner.models.weights import expected_tensors

LOCAL, GLOBAL = "sliding_attention", "full_attention"
# The published config.json of google/gemma-3-270m and google/gemma-3-1b-pt, without harmless keys.
GEMMA3_270M: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [GLOBAL if (i + 1) % 6 == 0 else LOCAL for i in range(18)],
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
GEMMA3_1B = {key: value for key, value in GEMMA3_270M.items() if "layer_types" not in key} | {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "sliding_window_pattern": 6,
}
E2B: dict[str, Any] = dict(PRESETS["gemma-4-e2b"])
E4B: dict[str, Any] = dict(PRESETS["gemma-4-e4b"])
# As the 31B model, with fewer layers: keys are values in global layers, nothing is shared.
KEYS_AS_VALUES = {
    **E4B,
    "num_hidden_layers": 12,
    "layer_types": E4B["layer_types"][:12],
    "attention_k_eq_v": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "Gemma3ForCausalLM": (Gemma3TextConfig, Gemma3ForCausalLM),
    "Gemma4ForCausalLM": (Gemma4TextConfig, Gemma4ForCausalLM),
}
ALL = {
    "gemma3-270m": GEMMA3_270M, "gemma3-1b": GEMMA3_1B, "e2b": E2B, "e4b": E4B, "k-eq-v": KEYS_AS_VALUES,
}  # fmt: skip


@pytest.fixture(params=list(ALL))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ALL[request.param]


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def test_tensors_are_those_of_transformers(values: dict[str, Any]) -> None:
    """Name and shape of every tensor of the full-sized models, which take no memory there."""
    config_class, model_class = CLASSES[values["architectures"][0]]
    with torch.device("meta"):
        model = model_class(config_class(**without(values, "architectures", "model_type")))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert theirs.pop("lm_head.weight") == (values["vocab_size"], values["hidden_size"])
    assert expected_tensors(parse_config(values)) == theirs


def test_what_transformers_writes_means_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(values))
    AutoConfig.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    rewritten = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in rewritten
    assert "global_head_dim" not in rewritten
    assert parse_config(rewritten) == parse_config(values)


def test_gemma3_by_its_published_constants() -> None:
    config = parse_config(GEMMA3_270M)
    assert config.embed_scale == 640**0.5
    assert (config.query_scale, config.norm_offset) == (1 / 16, 1.0)
    assert config.tie_word_embeddings
    assert [layer.window for layer in config.layers] == ([512] * 5 + [None]) * 3
    local, full = RopeConfig(theta=1e4), RopeConfig(theta=1e6)
    assert [layer.rope for layer in config.layers] == ([local] * 5 + [full]) * 3
    assert [layer.window for layer in parse_config(GEMMA3_1B).layers] == ([512] * 5 + [None]) * 4 + [512] * 2


def test_gemma3_rope_scaling_is_that_of_global_layers() -> None:
    config = parse_config({**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    scalings = {layer.window: layer.rope.scaling for layer in config.layers}
    assert scalings == {512: None, None: LinearRopeScaling(factor=8.0)}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gemma-4-e2b", {"layers": 35, "hidden": 1536, "mlp": 6144, "kv_heads": 1, "shared": 20}),
        ("gemma-4-e4b", {"layers": 42, "hidden": 2560, "mlp": 10_240, "kv_heads": 2, "shared": 18}),
    ],
)
def test_gemma4_presets(name: str, published: dict[str, int]) -> None:
    config = parse_config(PRESETS[name])
    assert (config.num_layers, config.hidden_size) == (published["layers"], published["hidden"])
    assert (config.num_heads, config.vocab_size) == (8, 262_144)
    assert {layer.num_kv_heads for layer in config.layers} == {published["kv_heads"]}
    assert {(layer.head_dim, layer.window) for layer in config.layers} == {(256, 512), (512, None)}
    assert config.per_layer_input_width == 256
    assert config.final_logit_softcap == 30.0
    first = config.num_layers - published["shared"]
    for index, layer in enumerate(config.layers):
        assert (layer.kv_source is None) == (index < first)
        double = name == "gemma-4-e2b" and index >= first
        assert layer.intermediate_size == published["mlp"] * (2 if double else 1)
    assert config.layers[-1].rope == RopeConfig(
        theta=1e6, scaling=ProportionalRope(partial_rotary_factor=0.25)
    )
    assert config.layers[0].rope == RopeConfig(theta=1e4)


def test_gemma4_preset_values_are_the_reference_defaults() -> None:
    """Where the reference has a default that is not a size, leaving a key out means the same."""
    defaults = Gemma4TextConfig().to_dict()
    for preset in PRESETS.values():
        for key in (
            "head_dim", "sliding_window", "vocab_size", "vocab_size_per_layer_input",
            "hidden_size_per_layer_input", "hidden_activation", "max_position_embeddings", "rms_norm_eps",
            "tie_word_embeddings", "num_attention_heads",
        ):  # fmt: skip
            assert preset[key] == defaults[key], key
        left_out = without(
            preset, "global_head_dim", "sliding_window", "hidden_size_per_layer_input",
            "vocab_size_per_layer_input", "tie_word_embeddings",
        )  # fmt: skip
        assert parse_config(left_out) == parse_config(preset)


# In 10⁹ parameters: 5.1 and 8 as published, less a vision encoder of 0.15 and an audio encoder of 0.3.
@pytest.mark.parametrize(("name", "published"), [("gemma-4-e2b", 5.1 - 0.45), ("gemma-4-e4b", 8.0 - 0.45)])
def test_gemma4_presets_have_the_published_size(name: str, published: float) -> None:
    shapes = expected_tensors(parse_config(PRESETS[name]))
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9
    assert total == pytest.approx(published, abs=0.1)


@pytest.mark.parametrize("values", [E2B, E4B, {**E4B, "num_kv_shared_layers": 0}])
def test_layers_read_the_keys_that_the_reference_shares(values: dict[str, Any]) -> None:
    theirs = Gemma4TextConfig(**without(values, "architectures", "model_type"))
    modes = theirs.kv_sharing_modes
    config = parse_config(values)
    for index, layer in enumerate(config.layers):
        assert (layer.kv_source is not None) == (modes[index] == "reuse")
        if layer.kv_source is not None:
            assert modes[layer.kv_source] == "store"
            assert theirs.layer_types[layer.kv_source] == theirs.layer_types[index]


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"26B-A4B.*E2B, E4B"):
        parse_config({**E4B, "enable_moe_block": True, "num_experts": 128})
    with pytest.raises(UnsupportedModelError, match=r"num_experts = 128 .*mixture"):
        parse_config({**E4B, "num_experts": 128})


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (GEMMA3_270M, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_270M, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3_270M, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA3_270M, {"layer_types": [LOCAL] * 17}, "layer_types"),
        (GEMMA3_270M, {"layer_types": ["chunked_attention"] * 18}, "chunked_attention"),
        (GEMMA3_270M, {"sliding_window": None}, "sliding_window"),
        (GEMMA3_270M, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA3_270M, {"rope_parameters": {LOCAL: {}, GLOBAL: {}}}, "both"),
        (GEMMA3_270M, {"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        (GEMMA3_1B, {"_sliding_window_pattern": 4}, "_sliding_window_pattern"),
        (E2B, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (E2B, {"num_kv_shared_layers": 35}, "none of 35 layers"),
        (E2B, {"num_kv_shared_layers": 31}, "no full_attention layer"),
        (E2B, {"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input"),
        (E2B, {"global_head_dim": 511}, "511"),
        (E2B, {"per_layer_config": {"4": {"head_dim": 512}}}, "both"),
        (E2B, {"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}}, "chunked_attention"),
        (E2B, {"rope_parameters": {GLOBAL: {"rope_type": "longrope"}}}, "longrope"),
        (
            without(E2B, "global_head_dim"),
            {"per_layer_config": {str(i): {"head_dim": 512} for i in range(4, 30, 5)}},
            "heads differ",
        ),
        (without(E2B, "global_head_dim"), {"per_layer_config": {"4": {"window": 5}}}, "window"),
        (without(E2B, "global_head_dim"), {"per_layer_config": {"35": {"head_dim": 512}}}, "35"),
        (without(E2B, "global_head_dim"), {"per_layer_config": {"4": {}, "04": {}}}, "04"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(base: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config({**base, **change})


def test_text_is_causal_where_only_vision_is_not() -> None:
    assert parse_config({**E2B, "use_bidirectional_attention": "vision"}) == parse_config(E2B)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
KEYS = sorted({*E2B, *GEMMA3_270M, "rope_parameters", "per_layer_config", "attention_k_eq_v"})


@settings(max_examples=100, deadline=None)
@given(
    base=st.sampled_from(list(ALL.values())),
    changes=st.dictionaries(
        st.sampled_from(KEYS) | st.text(max_size=8), JSON | st.integers(0, 64), max_size=3
    ),
)
def test_hostile_configurations_give_only_model_errors(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        config = parse_config({**base, **changes})
    except ModelError:
        return
    check(config)


def check(config: DecoderConfig) -> None:
    assert len(config.layers) == config.num_layers
    for index, layer in enumerate(config.layers):
        assert layer.num_heads % layer.num_kv_heads == 0
        assert layer.head_dim % 2 == 0
        if layer.kv_source is not None:
            source = config.layers[layer.kv_source]
            assert layer.kv_source < index
            assert source.kv_source is None
            assert (source.num_kv_heads, source.head_dim, source.window, source.rope) == (
                layer.num_kv_heads, layer.head_dim, layer.window, layer.rope,
            )  # fmt: skip
