"""What the commands say about memory, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gelo_cli import serve
from gelo_cli.main import app
from tee_runner.engine import capacity
from tee_runner.engine.runtime import RuntimeOptions
from tee_runner.errors import CapacityError, ModelError
from tee_runner.models import ModelHeader, read_header
from tee_runner.models.presets import PRESETS, preset_config
from tee_runner.protection.lpn.options import LpnOptions

HEADER = ModelHeader(preset_config("qwen3-4b"), 2)


@pytest.mark.parametrize(
    ("protection", "least", "kept"),
    [("gelo-hd3", "6.91 GB", "integrity check 0.02 GB"), ("lpn", "20.92 GB", "protection 14.06 GB")],
)
def test_serve_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    protection: str,
    least: str,
    kept: str,
) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 32_000_000_000)
    options = RuntimeOptions(worker="", kv_dtype="bfloat16", protection=protection)
    serve.check_memory("qwen3-4b", HEADER, options)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{least} for 8 sequences of 4096 tokens, KV cache in bfloat16" in said
    assert "KV cache 4.83 GB" in said
    assert kept in said
    assert "available: 32.00 GB" in said


def test_serve_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 4_000_000_000)
    with pytest.raises(
        CapacityError, match=r"qwen3-4b needs 11\.\d\d GB .* 4\.00 GB of memory are available"
    ):
        serve.check_memory("qwen3-4b", HEADER, RuntimeOptions(worker="", protection="gelo-hd3"))
    fits = RuntimeOptions(worker="", protection="gelo-hd3", max_sequences=2, kv_dtype="int8")
    serve.check_memory("qwen3-4b", HEADER, fits)


def test_serve_refuses_pools_that_do_not_fit_and_takes_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 16_000_000_000)
    with pytest.raises(CapacityError, match=r"protection 14\.\d\d GB.* a smaller --lpn-memory"):
        serve.check_memory("qwen3-4b", HEADER, RuntimeOptions(worker="", kv_dtype="int8"))
    small = LpnOptions(bytes_per_parameter=2.0)
    serve.check_memory("qwen3-4b", HEADER, RuntimeOptions(worker="", kv_dtype="int8", lpn=small))


def test_a_model_that_is_not_the_preset_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["qwen3-1.7b"])))
    with pytest.raises(ModelError, match="num_layers is 28, not 36"):
        read_header(tmp_path, preset="qwen3-4b")
    with pytest.raises(ModelError, match="neither"):
        read_header(tmp_path, preset="qwen3-1.7b")


def test_models_list_shows_families_sizes_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GELO_CACHE", str(tmp_path))
    listed = CliRunner().invoke(app, ["models", "list"])
    assert listed.exit_code == 0
    lines = {line.split()[0]: line.split() for line in listed.stdout.splitlines()[1:] if line.strip()}
    assert lines.keys() == PRESETS.keys()
    assert lines["qwen3-4b"][1:] == ["qwen3", "4022", "M", "8.04", "GB", "25.76", "GB", "9.66", "GB", "hub"]
    assert lines["gemma-3-270m"][1] == "gemma3_text"
