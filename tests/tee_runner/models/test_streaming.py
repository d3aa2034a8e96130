"""Weights pass through: a process that loads a model holds its embedding and a little, never the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.load import write_checkpoint
from tee_runner.engine.capacity import memory_plan
from tee_runner.engine.runtime import RuntimeOptions
from tee_runner.models import load_model, parse_config
from tee_runner.models.checkpoint import Checkpoint

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 24,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}
SHARD = 48_000_000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_checkpoint(SHAPE, path, shard_bytes=SHARD)
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_the_peak_is_embeddings_norms_and_a_shard(directory: Path) -> None:
    shards = [path.stat().st_size for path in directory.glob("*.safetensors")]
    plan = memory_plan(parse_config(SHAPE), RuntimeOptions(worker="")).parts
    bound = plan["embeddings"] + plan["norms and biases"] + max(shards)
    assert sum(shards) > 3 * bound  # a loader that kept what it read would show
    command = [sys.executable, "-m", "bench.load", "--no-check", "--measure", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert plan["embeddings"] < json.loads(done.stdout)["peak"] <= bound


def test_what_was_let_go_of_reads_the_same(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    for name in checkpoint:
        before = checkpoint.array(name)
        copy = np.array(before)
        checkpoint.release(name)
        np.testing.assert_array_equal(before, copy, err_msg=name)
    model = load_model(directory)
    first, again = (model.weights.layers[3].gate_up.load() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.any()
