"""config.json parsing: what transformers writes is understood, everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from tee_runner.decoder.config import LinearRopeScaling, Llama3RopeScaling
from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_window_layers": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
}
ALL = [LLAMA, QWEN3, QWEN2, MISTRAL]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_dimensions_and_defaults() -> None:
    config = parse_config(LLAMA)
    assert (config.family, config.head_dim, config.q_dim, config.kv_dim) == ("llama", 64, 576, 192)
    assert config.rope.theta == 100000.0
    assert config.rope.scaling is None
    assert config.tie_word_embeddings
    assert not (config.qk_norm)
    assert not (config.qkv_bias)
    assert not (config.o_bias)
    assert not (config.mlp_bias)
    assert config.sliding_windows == (None,) * 4


def test_family_traits() -> None:
    assert parse_config(QWEN3).qk_norm
    assert parse_config(QWEN3).head_dim == 128
    assert not parse_config(QWEN3).qkv_bias
    qwen2 = parse_config(QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    biased = parse_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert biased.qkv_bias
    assert biased.o_bias
    assert biased.mlp_bias
    assert parse_config({**QWEN3, "attention_bias": True}).o_bias


@pytest.mark.parametrize("base", ALL, ids=lambda base: base["model_type"])
def test_what_transformers_writes_means_the_same(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps({**base, "rope_scaling": LLAMA3_ROPE}))
    AutoConfig.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    rewritten = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in rewritten
    assert "rope_theta" not in rewritten
    assert parse_config(rewritten) == parse_config({**base, "rope_scaling": LLAMA3_ROPE})


def test_rope_scalings() -> None:
    linear = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.rope.scaling == LinearRopeScaling(factor=2.0)
    expected = Llama3RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert parse_config({**LLAMA, "rope_scaling": LLAMA3_ROPE}).rope.scaling == expected
    new = {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}
    del new["rope_theta"]
    assert parse_config(new).rope.scaling == expected
    assert parse_config(new).rope.theta == 5e5
    old = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    assert parse_config(old).rope.theta == 10000.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", 7, ["llama3"]])
def test_other_rope_types_are_refused_by_name(kind: object) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e5}
    with pytest.raises(UnsupportedModelError, match="rope_type") as caught:
        parse_config({**LLAMA, "rope_parameters": rope})
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_scaling": LLAMA3_ROPE}, "both"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "contradicts"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None, "model_type": "llama"}, None),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2.0}}, "two types"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 1.0}}, None),
    ],
)
def test_rope_contradictions(change: dict[str, Any], named: str | None) -> None:
    if named is None:
        parse_config({**LLAMA, **change})
    else:
        with pytest.raises(ModelError, match=named):
            parse_config({**LLAMA, **change})


def test_sliding_windows() -> None:
    assert parse_config(MISTRAL).sliding_windows == (4096,) * 4
    assert parse_config({**MISTRAL, "sliding_window": None}).sliding_windows == (None,) * 4
    sliding = {**QWEN2, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    assert parse_config(sliding).sliding_windows == (None, None, None, 32)
    types = ["sliding_attention", "full_attention"] * 2
    assert parse_config({**sliding, "layer_types": types}).sliding_windows == (32, None, 32, None)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        parse_config({**QWEN3, "layer_types": types})
    with pytest.raises(ModelError, match="layer_types"):
        parse_config({**QWEN3, "layer_types": types[:3]})
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        parse_config({**QWEN3, "layer_types": ["linear_attention"] * 4})
    with pytest.raises(ModelError, match="'sliding_window'"):
        parse_config({key: value for key, value in MISTRAL.items() if key != "sliding_window"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3MoeForCausalLM"]),
        ("architectures", ["LlamaForCausalLM", "X"]),
        ("architectures", [["LlamaForCausalLM"]]),
        ("model_type", "qwen3_moe"),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("partial_rotary_factor", True),
        ("rope_interleaved", True),
        ("num_local_experts", 8),
        ("auto_map", {"AutoModel": "evil.py"}),
        ("sliding_window", 128),
        ("is_encoder_decoder", True),
        ("logit_scale", 0.1),
        ("a_key_nobody_knows", None),
    ],
)
def test_unsupported_keys_are_named_with_their_value(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=key) as caught:
        parse_config({**LLAMA, key: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "model_type",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "head_dim",
        "rope_theta",
    ],
)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the required key '{key}'"):
        parse_config({name: value for name, value in QWEN3.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 2**40),
        ("hidden_size", 576.0),
        ("hidden_size", True),
        ("hidden_size", 577),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**400),
        ("num_key_value_heads", 2),
        ("num_key_value_heads", 18),
        ("num_attention_heads", "9"),
        ("head_dim", 63),
        ("head_dim", 0),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", "1e5"),
        ("tie_word_embeddings", 1),
        ("attention_bias", "no"),
    ],
)
def test_values_out_of_bounds(key: str, value: object) -> None:
    with pytest.raises(ModelError):
        parse_config({**LLAMA, key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
KEYS = sorted({*QWEN3, "rope_parameters", "layer_types", "attention_bias", "mlp_bias", "quantization_config"})


@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(ALL),
    changes=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), JSON, max_size=3),
)
def test_hostile_configurations_give_only_model_errors(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        config = parse_config({**base, **changes})
    except ModelError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert len(config.sliding_windows) == config.num_layers
