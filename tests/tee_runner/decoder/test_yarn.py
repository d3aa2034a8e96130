"""YaRN: configuration, frequencies and tables are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tee_runner.decoder.config import RopeConfig, YarnRopeScaling
from tee_runner.decoder.rope import inverse_frequencies, rope_tables
from tee_runner.errors import ModelError
from tee_runner.models import parse_config

from . import small_models

SINGLE_ROUNDING = 2.0**-24
PUBLISHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def qwen3(rope: dict[str, Any], *, theta: float = 1e6, head_dim: int = 128) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 151936,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "rope_scaling": rope,
    }


def compare(values: dict[str, Any], *, positions: int = 300) -> RopeConfig:
    """Ours against transformers' rotary embedding for the same config.json."""
    config = parse_config(values)
    rope, head_dim = config.rope, config.head_dim
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**copy.deepcopy(values)))
    cosines, sines = rotary(torch.zeros(1, positions, head_dim), torch.arange(positions)[None])
    assert isinstance(rope.scaling, YarnRopeScaling)
    # Their powers of theta are float32: the exponent's rounding is multiplied by ln theta, at most 13.8.
    # Their ramp is float32 too: where it is almost 1, its rounding is multiplied by the factor.
    relative = (13.8 + 8 + 3 * rope.scaling.factor) * SINGLE_ROUNDING
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), rotary.inv_freq.numpy(), rtol=relative)
    ours = rope_tables(rope, head_dim, positions)
    for table, reference in zip(ours, (cosines, sines), strict=True):
        np.testing.assert_allclose(
            table, reference[0, :, : head_dim // 2].numpy(), atol=2 * relative * positions
        )
    return rope


def test_the_published_form_of_qwen3() -> None:
    scaling = compare(qwen3(PUBLISHED)).scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert scaling.attention_factor == pytest.approx(1.1386294361119891)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)


def test_the_attention_factor_scales_both_tables() -> None:
    wide = compare(qwen3({**PUBLISHED, "attention_factor": 2.0}))
    cosines, sines = rope_tables(wide, 128, 50)
    np.testing.assert_allclose(cosines**2 + sines**2, 4.0, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([256, 4096, 32768, 1_000_000]),
    betas=st.sampled_from([{}, {"beta_fast": 64.0, "beta_slow": 2.0}, {"beta_fast": 4}, {"beta_slow": 0.25}]),
    factors=st.sampled_from(
        [{}, {"attention_factor": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 0.7}]
    ),
    truncate=st.sampled_from([{}, {"truncate": True}, {"truncate": False}]),
    theta=st.sampled_from([1e4, 1e6]),
    head_dim=st.sampled_from([64, 80, 128]),
)
def test_every_option(
    factor: float,
    original: int,
    betas: dict[str, float],
    factors: dict[str, float],
    truncate: dict[str, bool],
    theta: float,
    head_dim: int,
) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    compare(qwen3({**rope, **betas, **factors, **truncate}, theta=theta, head_dim=head_dim), positions=40)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"factor": 0.5}, "factor"),
        ({"factor": None}, "factor"),
        ({"beta_fast": 1, "beta_slow": 1}, "beta_fast"),
        ({"attention_factor": 0.0}, "attention_factor"),
        ({"truncate": 1}, "truncate"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"finetuned": True}, "finetuned"),
    ],
)
def test_malformed_values_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(qwen3({**PUBLISHED, **changes}))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_beyond_the_original_context(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, model_class, overrides = small_models.FAMILIES[family]
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
    }
    entry = (config_class, model_class, {**overrides, "rope_parameters": rope})
    monkeypatch.setitem(small_models.FAMILIES, "yarn", entry)
    model = small_models.make("yarn", small_models.STRONG, tmp_path)
    assert isinstance(model.ours.config.rope.scaling, YarnRopeScaling)
    tokens = small_models.tokens_of(5, 110)
    cache = model.cache(1)
    batch = small_models.batch_of([(cache.take(), tokens, len(tokens))])
    logits = model.decoder().forward(batch, cache, model.session())
    assert small_models.distance(logits, model.reference(tokens)) < 1e-4
