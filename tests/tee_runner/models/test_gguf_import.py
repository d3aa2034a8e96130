"""Importing GGUF files: faithful where supported, refused by name where not, safe on hostile bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import Tokenizer, import_gguf, load_model
from tee_runner.models.gguf_file import GgufFile

from .conftest import MERGES, SPECIALS, VOCAB, small_model
from .gguf_files import metadata_of, tensors_of, write

PROMPT = (
    "<|im_start|>user\nWhat is the capital of France, and why is it famous?<|im_end|>\n"
    "<|im_start|>assistant\nParis"
)
Changes = dict[str, Any]
MakeGguf = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Write a small model as GGUF with some metadata and tensors changed or (None) left out."""

    def make(
        family: str, metadata: Changes | None = None, tensors: Changes | None = None, **overrides: Any
    ) -> tuple[Path, Any]:
        model = small_model(family, **overrides)
        keys = metadata_of(model, VOCAB, MERGES, len(SPECIALS)) | (metadata or {})
        arrays = tensors_of(model) | (tensors or {})
        path = write(
            tmp_path / "model.gguf",
            family,
            {k: v for k, v in keys.items() if v is not None},
            {k: v for k, v in arrays.items() if v is not None},
        )
        return path, model

    return make


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return result


def reference_model(path: Path) -> Any:
    """The Llama model that transformers' own GGUF reader makes of ``path``, float32."""
    parsed = load_gguf_checkpoint(str(path))["config"]
    model = LlamaForCausalLM(LlamaConfig(**parsed)).to(torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors)
    return model


@pytest.mark.model
def test_default_model_is_what_transformers_reads_from_the_same_gguf(
    smollm2_dir: Path, smollm2_gguf: Path
) -> None:
    reference = reference_model(smollm2_gguf)
    state = reference.state_dict()
    ours = load_file(smollm2_dir / "model.safetensors")
    assert set(ours) == set(state) - {"lm_head.weight"}
    for name, array in ours.items():
        expected = state[name].numpy().astype(np.float16 if array.ndim == 2 else np.float32)
        np.testing.assert_array_equal(array, expected, err_msg=name)

    imported = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    assert np.float32(imported.config.rms_norm_eps) == np.float32(reference.config.rms_norm_eps)
    for key in ("rope_parameters", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(imported.config, key) == getattr(reference.config, key)
    ids = Tokenizer(smollm2_dir).encode(PROMPT)
    expected_logits, got = logits(reference, ids), logits(imported, ids)
    # Rounding to float16 perturbs each weight by a relative 2^-12 at most (half a unit in the last
    # place, 11 significant bits), at random: each of the 4 products of each of the 30 layers adds
    # about that, so sqrt(120) * 2^-12 = 0.3 % in all; a wrong permutation or configuration gives ~1.
    error = torch.linalg.norm(got - expected_logits) / torch.linalg.norm(expected_logits)
    assert error < 120**0.5 * 2.0**-12
    assert torch.equal(got.argmax(-1), expected_logits.argmax(-1))


@pytest.mark.model
def test_default_model_against_the_gguf_library(smollm2_dir: Path, smollm2_gguf: Path) -> None:
    reader = GGUFReader(smollm2_gguf)
    file = GgufFile(smollm2_gguf)
    assert file.tensors.keys() == {tensor.name for tensor in reader.tensors}
    assert file.metadata == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    ours = load_file(smollm2_dir / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for source, target, heads in (
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight", 9),
        ("blk.7.attn_k.weight", "model.layers.7.self_attn.k_proj.weight", 3),
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight", None),
        ("token_embd.weight", "model.embed_tokens.weight", None),
    ):
        expected = dequantize(tensors[source].data, tensors[source].tensor_type)
        if heads is not None:
            # Row 2 j + s of a head in the GGUF file is row j + 32 s of the head in the model.
            order = [64 * h + 2 * (r % 32) + r // 32 for h in range(heads) for r in range(64)]
            expected = expected[order]
        np.testing.assert_array_equal(ours[target], expected.astype(np.float16))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_small_models_keep_their_logits(family: str, tied: bool, make_gguf: MakeGguf, tmp_path: Path) -> None:
    path, model = make_gguf(family, tie_word_embeddings=tied)
    directory = import_gguf(path, tmp_path / "out", dtype="float32")
    imported = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = list(range(0, 262, 5))
    # The same float32 weights through the same code.
    torch.testing.assert_close(logits(imported, ids), logits(model, ids), rtol=1e-6, atol=1e-6)
    loaded = load_model(directory)
    assert loaded.config.tie_word_embeddings == tied
    assert loaded.config.qk_norm == (family == "qwen3")
    assert loaded.eos_ids == {261}


def test_llama3_frequency_factors_are_recognised(make_gguf: MakeGguf, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = small_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    inverse = model.model.rotary_emb.inv_freq.double().numpy()
    plain = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    factors = (plain / inverse).astype(np.float32)
    assert len(set(factors.round(3))) >= 3
    settings_ = {"rope_parameters": rope, "max_position_embeddings": 131072}
    path, model = make_gguf("llama", tensors={"rope_freqs.weight": factors}, **settings_)
    directory = import_gguf(path, tmp_path / "out", dtype="float32")
    assert json.loads((directory / "config.json").read_text())["rope_parameters"] == rope
    imported = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = list(range(0, 262, 5))
    torch.testing.assert_close(logits(imported, ids), logits(model, ids), rtol=1e-6, atol=1e-6)

    path, _ = make_gguf("llama", tensors={"rope_freqs.weight": factors * 1.01}, **settings_)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        import_gguf(path, tmp_path / "other")


def test_linear_rope_scaling(make_gguf: MakeGguf, tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    directory = import_gguf(make_gguf("llama", scaling)[0], tmp_path / "out")
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
        ({"tokenizer.ggml.tokens": ["a"]}, "token types"),
        ({"tokenizer.ggml.tokens": ["a"] * len(VOCAB)}, "twice"),
        ({"tokenizer.ggml.token_type": [6] * len(VOCAB)}, "token type 6"),
        ({"tokenizer.ggml.merges": ["a bcdef"]}, r"merges\[0\]"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges\[0\]"),
        ({"tokenizer.ggml.eos_token_id": 262}, "eos_token_id"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "begin or end"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 128}, "sliding_window"),
        ({"llama.rope.dimension_count": 16}, "dimension_count"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.block_count": None}, r"lacks the key 'llama\.block_count'"),
        ({"llama.block_count": 2**31}, "block_count"),
        ({"llama.block_count": "three"}, "block_count"),
        ({"llama.block_count": 4}, r"blk\.3"),
        ({"llama.embedding_length": 32}, "shape"),
        ({"llama.attention.head_count_kv": 3}, "divisible"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"general.alignment": 24}, "alignment"),
    ],
)
def test_metadata_that_cannot_be_served_is_named(
    metadata: Changes, named: str, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        import_gguf(make_gguf("llama", metadata)[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        import_gguf(write(tmp_path / "m.gguf", "mamba", {}, {}), tmp_path / "out")


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"blk.0.attn_q.bias": np.zeros(128, np.float32)}, r"attn_q\.bias"),
        ({"blk.1.attn_v.weight": None}, r"attn_v\.weight"),
        ({"blk.1.attn_v.weight": np.zeros((65, 64), np.float32)}, r"\(65, 64\)"),
        ({"blk.1.attn_v.weight": np.zeros((64, 64), np.int32)}, "I32"),
        ({"blk.1.attn_v.weight": np.full((64, 64), 1e5, np.float32)}, "v_proj"),
        ({"blk.1.attn_norm.weight": np.full(64, np.nan, np.float32)}, "not finite"),
    ],
)
def test_tensors_that_cannot_be_served_are_named(
    tensors: Changes, named: str, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    path, _ = make_gguf("llama", tensors=tensors)
    before = set(tmp_path.iterdir())
    with pytest.raises(ModelError, match=named):
        import_gguf(path, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before  # nothing half-written is left


def test_destination_and_dtype_are_checked(make_gguf: MakeGguf, tmp_path: Path) -> None:
    path, _ = make_gguf("llama")
    seen: list[tuple[str, int, int]] = []
    import_gguf(path, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert seen[-1] == ("import", 30, 30)
    with pytest.raises(ModelError, match="exists already"):
        import_gguf(path, tmp_path / "out")
    with pytest.raises(ModelError, match="int8"):
        import_gguf(path, tmp_path / "int8", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="Cannot open"):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "new")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny valid container: one of each kind of value, and one tensor."""
    metadata = {"a": 1, "b": 2.5, "c": "text", "d": ["x", "yz"], "e": [1, 2], "f": True}
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write(path, "llama", metadata, {"t": np.ones((2, 32), np.float32)}).read_bytes()


def _open(data: bytes, directory: Path) -> GgufFile:
    path = directory / "hostile.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_every_truncation_is_an_error(gguf_bytes: bytes, tmp_path: Path) -> None:
    assert _open(gguf_bytes, tmp_path).read("t").shape == (2, 32)
    for length in range(len(gguf_bytes)):
        with pytest.raises(ModelError):
            _open(gguf_bytes[:length], tmp_path)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 400), patch=st.binary(min_size=1, max_size=9))
@example(position=8, patch=b"\xff" * 8)
@example(position=16, patch=b"\xff" * 8)
@example(position=24, patch=struct.pack("<Q", 2**62))
def test_hostile_bytes_give_only_model_errors(
    position: int, patch: bytes, gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = gguf_bytes[:position] + patch + gguf_bytes[position + len(patch) :]
    directory = tmp_path_factory.getbasetemp()
    try:
        file = _open(data, directory)
        for name in file.tensors:
            file.read(name)
        import_gguf(directory / "hostile.gguf", directory / "never")
    except ModelError:
        return
    pytest.fail("a container without a model was imported")


def test_array_length_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    # Byte elements of a declared 2^60-entry array would otherwise be looped over.
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**60)
    with pytest.raises(ModelError, match="array"):
        _open(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key, tmp_path)
