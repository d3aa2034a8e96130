"""The model identity covers everything that decides the output, and nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tee_runner.errors import ModelError
from tee_runner.models import load_model, model_identity

Saved = Callable[..., tuple[Path, Any]]


def test_sharding_and_file_order_do_not_matter(saved_model: Saved, tmp_path: Path) -> None:
    whole, _ = saved_model("qwen3")
    sharded, _ = saved_model("qwen3", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert model_identity(whole) == model_identity(sharded)
    reordered = tmp_path / "reordered"
    shutil.copytree(whole, reordered)
    tensors = load_file(whole / "model.safetensors")
    save_file(dict(reversed(tensors.items())), reordered / "model.safetensors", metadata={"x": "y"})
    config = json.loads((whole / "config.json").read_text())
    (reordered / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    (reordered / "README.md").write_text("not part of the model")
    assert model_identity(whole) == model_identity(reordered)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def _flip_one_bit(directory: Path) -> None:
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(data)


def _half(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({k: v.half() for k, v in tensors.items()}, directory / "model.safetensors")


def _swap_names(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, directory / "model.safetensors")


def _eps(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))


def _tokenizer_bytes(directory: Path) -> None:
    with (directory / "tokenizer.json").open("a") as handle:
        handle.write("\n")


CHANGES: list[Callable[[Path], object]] = [
    _flip_one_bit,
    _half,
    _swap_names,
    _eps,
    _tokenizer_bytes,
    _write("chat_template.jinja", "{{ messages[0].content }}"),
    _write("generation_config.json", '{"eos_token_id": [0]}'),
    _write("tokenizer_config.json", '{"bos_token": "injected"}'),
]


def test_every_part_changes_the_identity(saved_model: Saved, tmp_path: Path) -> None:
    base, _ = saved_model("llama")
    identities = {model_identity(base)}
    for number, change in enumerate(CHANGES):
        directory = tmp_path / f"changed-{number}"
        shutil.copytree(base, directory)
        change(directory)
        identities.add(model_identity(directory))
    assert len(identities) == len(CHANGES) + 1
    assert {len(identity) for identity in identities} == {32}


def test_encoding_is_the_documented_one(saved_model: Saved) -> None:
    directory, _ = saved_model("qwen3")
    (directory / "chat_template.jinja").write_text("T")
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    fields = [
        b"gelo/model-identity/v1",
        json.dumps(config, sort_keys=True, separators=(",", ":")).encode(),
        b"\x01",
        str(len(tensors)).encode(),
    ]
    for name in sorted(tensors):
        shape = ",".join(str(n) for n in tensors[name].shape)
        raw = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        fields += [name.encode(), b"F32", shape.encode(), raw]
    fields += [(directory / "tokenizer.json").read_bytes(), b"T", b'{"eos_ids":[261],"special_tokens":{}}']
    encoded = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert model_identity(directory) == hashlib.sha256(encoded).digest()


def test_loading_gives_the_same_identity_and_reports_progress(saved_model: Saved) -> None:
    directory, _ = saved_model("mistral")
    steps: list[tuple[str, int, int]] = []
    loaded = load_model(directory, progress=lambda *step: steps.append(step))
    assert loaded.identity == model_identity(directory)
    assert {stage for stage, _, _ in steps} == {"identity"}
    assert (
        steps[-1][1]
        == steps[-1][2]
        == (directory / "model.safetensors").stat().st_size
        - (8 + int.from_bytes((directory / "model.safetensors").read_bytes()[:8], "little"))
    )


def test_loading_checks_the_directory_and_the_vocabulary(saved_model: Saved, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)
    directory, _ = saved_model("llama", vocab_size=261, eos_token_id=2, bos_token_id=1)
    with pytest.raises(ModelError, match="262 ids"):
        load_model(directory)
