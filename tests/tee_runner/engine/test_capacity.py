"""The memory plan against what is allocated, the refusal, and what Linux says is left."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.engine import capacity
from tee_runner.engine.capacity import MemoryPlan, memory_plan, require_memory
from tee_runner.engine.runtime import RuntimeOptions, longest_chunk, operand_limits, served_length
from tee_runner.errors import CapacityError
from tee_runner.models.presets import preset_config
from tests.tee_runner.decoder.small_models import STRONG, make

OPTIONS = RuntimeOptions(worker="", max_sequences=3, max_len=160, step_rows=24, protection="gelo-hd3")


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    """Every array that ``value`` holds in itself, weights that stay on disk left out."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in arrays_in(item)]
    if dataclasses.is_dataclass(value):
        return [a for field in dataclasses.fields(value) for a in arrays_in(getattr(value, field.name))]
    return []


@pytest.mark.parametrize("family", ["llama-bias", "qwen2-window", "gemma3", "gemma4"])
def test_the_plan_is_what_is_held(family: str, tmp_path: Path) -> None:
    model = make(family, STRONG, tmp_path).ours
    plan = memory_plan(model.config, OPTIONS, embedding_bytes_per_value=4).parts
    held = sum(array.nbytes for array in arrays_in(model.weights))
    # The plan takes every optional vector for present.
    assert (
        held
        <= plan["norms and biases"]
        <= held + 4 * 8 * model.config.hidden_size * (1 + model.config.num_layers)
    )
    specs = list(model.weights.linears())
    assert plan["largest weight"] == 2 * max(spec.d_in * spec.d_out for spec in specs)
    assert plan["integrity check"] == OPTIONS.integrity_probes * 4 * sum(s.d_in + s.d_out for s in specs)
    table = 4 * model.config.vocab_size * model.config.hidden_size
    if model.config.per_layer_input_width:
        rows, layers = model.config.per_layer_vocab_size, model.config.num_layers
        table += rows * layers * (model.config.per_layer_input_width + 4)
    assert plan["embeddings"] == table
    for dtype in ("float32", "bfloat16", "int8"):
        options = dataclasses.replace(OPTIONS, kv_dtype=dtype)
        cache = KvCache(model.config, slots=3, max_len=160, dtype=dtype, longest_chunk=longest_chunk(options))
        owned = {
            id(a): a.nbytes for a in [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]
        }
        assert memory_plan(model.config, options).parts["KV cache"] == sum(owned.values())
    # Both slabs, as the runtime asks for them, fit into what is planned for the wire.
    rows, head_rows = operand_limits(OPTIONS)
    slabs = 2 * max([rows * s.d_in for s in specs[:-1]] + [head_rows * specs[-1].d_in])
    slabs += 4 * max([rows * s.d_out for s in specs[:-1]] + [head_rows * specs[-1].d_out])
    assert slabs <= plan["wire buffers"]


def test_settings_move_the_part_they_should() -> None:
    config = preset_config("qwen3-4b")
    base = memory_plan(config, RuntimeOptions(worker=""))
    # 36 layers, keys and values of 8 heads of 128, 4096 positions, 8 sequences, 4 bytes.
    assert base.parts["KV cache"] == 36 * 2 * 8 * 128 * 4096 * 8 * 4
    assert base.parts["embeddings"] == 151_936 * 2560 * 2
    assert (base.max_sequences, base.max_len, base.kv_dtype) == (8, 4096, "float32")
    half = memory_plan(config, RuntimeOptions(worker="", kv_dtype="bfloat16"))
    assert half.parts["KV cache"] * 2 == base.parts["KV cache"]
    int8 = memory_plan(config, RuntimeOptions(worker="", kv_dtype="int8"))
    assert int8.parts["KV cache"] * 4 == base.parts["KV cache"] * (1 + 4 / 128)
    fewer = memory_plan(config, RuntimeOptions(worker="", max_sequences=2, max_len=1000))
    assert fewer.parts["KV cache"] * 4 * 4096 == base.parts["KV cache"] * 1000
    assert base.total == sum(base.parts.values())


def test_the_context_is_bounded_by_the_model() -> None:
    config = preset_config("smollm2-135m-instruct")
    assert served_length(config, RuntimeOptions(worker="")) == 4096
    assert served_length(config, RuntimeOptions(worker="", max_len=100_000)) == 8192


def test_what_does_not_fit_is_refused_by_name_and_number() -> None:
    config = preset_config("qwen3-4b")
    plan = memory_plan(config, RuntimeOptions(worker="", protection="gelo-hd3"))
    require_memory("qwen3-4b", plan, plan.total)
    require_memory("qwen3-4b", plan, None)
    with pytest.raises(CapacityError) as caught:
        require_memory("qwen3-4b", plan, 8_000_000_000)
    message = caught.value.message
    assert "qwen3-4b needs " + capacity.gigabytes(plan.total) in message
    assert "8 sequences of 4096 tokens" in message
    assert "KV cache in float32" in message
    assert "KV cache 9.66 GB" in message
    assert "8.00 GB of memory are available" in message
    assert "--kv-dtype" in caught.value.remedy
    # The same machine serves it with a smaller cache.
    smaller = RuntimeOptions(worker="", protection="gelo-hd3", kv_dtype="int8")
    require_memory("qwen3-4b", memory_plan(config, smaller), 8_000_000_000)


def test_small_parts_are_left_out_of_the_line() -> None:
    plan = MemoryPlan({"a": 1_000, "b": 2_000_000_000}, max_sequences=1, max_len=2, kv_dtype="int8")
    assert plan.describe() == "2.00 GB for 1 sequences of 2 tokens, KV cache in int8 (b 2.00 GB)"


def group(directory: Path, limit: str, used: int, inactive: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(limit + "\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nslab 2\n")


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    monkeypatch.setattr(capacity, "_MEMINFO", meminfo)
    monkeypatch.setattr(capacity, "_OWN_CGROUP", own)
    monkeypatch.setattr(capacity, "_CGROUPS", root)
    assert capacity.available_memory() is None  # not Linux: nothing is known
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   5000 kB\n")
    assert capacity.available_memory() == 5000 * 1024
    own.write_text("0::/a/b\n")
    assert capacity.available_memory() == 5000 * 1024  # no such group
    group(root / "a" / "b", "max", 100)
    group(root / "a", "4000000", 3_500_000, inactive=200_000)
    assert capacity.available_memory() == 700_000  # the outer group's limit holds as well
    group(root / "a" / "b", "1000000", 900_000)
    assert capacity.available_memory() == 100_000
    group(root / "a" / "b", "1000000", 2_000_000)
    assert capacity.available_memory() == 0
    own.write_text("4:memory:/x\n")
    assert capacity.available_memory() == 5000 * 1024


def test_this_machine_has_some() -> None:
    available = capacity.available_memory()
    assert available is None or available > 1_000_000


def test_preset_configs_have_plans() -> None:
    plans = {name: memory_plan(preset_config(name), OPTIONS).total for name in ("qwen3-1.7b", "qwen3-4b")}
    assert plans["qwen3-1.7b"] < plans["qwen3-4b"]


def test_double_wide_layers_count(tmp_path: Path) -> None:
    config: DecoderConfig = preset_config("gemma-4-e2b")
    widest = max(config.layer(i).intermediate_size for i in range(config.num_layers))
    assert widest == 2 * config.intermediate_size
    plan = memory_plan(config, OPTIONS)
    assert plan.parts["largest weight"] == 2 * config.vocab_size * config.hidden_size


def test_the_plan_counts_what_lpn_keeps() -> None:
    config = preset_config("qwen3-4b")
    plans = {
        name: memory_plan(config, RuntimeOptions(worker="", protection=name))
        for name in ("gelo-hd3", "plain-int8", "lpn")
    }
    weights = sum(
        d_in * d_out
        for i in range(config.num_layers)
        for d_in, d_out in (
            (2560, config.layer(i).qkv_dim), (4096, 2560), (2560, 2 * 9728), (9728, 2560),
        )
    ) + 2560 * config.vocab_size  # fmt: skip
    assert plans["gelo-hd3"].parts["protection"] == 0
    assert plans["plain-int8"].parts["protection"] == weights
    # Pools and weights within the default of 6 bytes a parameter, and rows made ahead.
    assert 2 * weights < plans["lpn"].parts["protection"] < 6.5 * weights
