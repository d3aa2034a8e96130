"""Safetensors files, indexes, and the weights made from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tee_runner.errors import InvalidRequestError, ModelError, UnsupportedModelError
from tee_runner.models import load_model
from tee_runner.models.checkpoint import Checkpoint, parse_index
from tee_runner.models.half import to_float16
from tee_runner.models.json_file import parse_json_object
from tee_runner.models.safetensors_file import (
    SafetensorsFile,
    TensorSource,
    parse_header,
    write_safetensors,
)

Saved = Callable[..., tuple[Path, Any]]


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply ``change`` to the tensors of a one-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reads_what_the_reference_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {"b": torch.randn(5, 3).to(dtype), "a": torch.randn(7).to(dtype), "s": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint) == ["a", "b", "s"]
    for name, tensor in tensors.items():
        array = checkpoint.array(name)
        assert array.shape == tuple(tensor.shape)
        assert not array.flags.writeable
        np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    values = {
        "x": np.arange(6, dtype=np.float16).reshape(2, 3),
        "y": np.arange(4, dtype=np.float32),
        "z": np.arange(3).astype(ml_dtypes.bfloat16),
    }
    names = {"x": "F16", "y": "F32", "z": "BF16"}
    sources = {k: TensorSource(names[k], v.shape, lambda v=v: v) for k, v in values.items()}
    write_safetensors(tmp_path / "model.safetensors", sources)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(tensor.float().numpy(), values[name].astype(np.float32))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {}),
    ],
)
def test_weights_are_the_models(family: str, overrides: dict[str, Any], saved_model: Saved) -> None:
    directory, model = saved_model(family, **overrides)
    loaded = load_model(directory)
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    prefix = "model.layers.1."

    def rows(kind: str, *parts: str) -> np.ndarray[Any, Any]:
        return np.concatenate([state[f"{prefix}{part}_proj.{kind}"] for part in parts])

    attention = ("self_attn.q", "self_attn.k", "self_attn.v")
    layer = loaded.weights.layers[1]
    for spec, parts in (
        (layer.qkv, attention),
        (layer.o, ("self_attn.o",)),
        (layer.gate_up, ("mlp.gate", "mlp.up")),
        (layer.down, ("mlp.down",)),
    ):
        weight = spec.load()
        assert weight.dtype == np.float16
        assert weight.flags.c_contiguous
        assert weight.shape == (spec.d_out, spec.d_in)
        np.testing.assert_array_equal(weight, rows("weight", *parts).astype(np.float16))
    for bias, parts in (
        (layer.qkv_bias, attention),
        (layer.o_bias, ("self_attn.o",)),
        (layer.gate_up_bias, ("mlp.gate", "mlp.up")),
        (layer.down_bias, ("mlp.down",)),
    ):
        if f"{prefix}{parts[0]}_proj.bias" not in state:
            assert bias is None
        else:
            assert bias is not None
            np.testing.assert_array_equal(bias, rows("bias", *parts))
    for norm, name in ((layer.q_norm, "self_attn.q_norm"), (layer.k_norm, "self_attn.k_norm")):
        assert (norm is None) == (f"{prefix}{name}.weight" not in state)
        if norm is not None:
            np.testing.assert_array_equal(norm, state[f"{prefix}{name}.weight"])
    np.testing.assert_array_equal(layer.input_norm, state[prefix + "input_layernorm.weight"])
    np.testing.assert_array_equal(
        layer.post_attention_norm, state[prefix + "post_attention_layernorm.weight"]
    )
    np.testing.assert_array_equal(loaded.weights.final_norm, state["model.norm.weight"])
    np.testing.assert_array_equal(loaded.weights.lm_head.load(), state["lm_head.weight"].astype(np.float16))
    ids = np.array([3, 0, 3, 261], np.int64)
    embedded = loaded.weights.embed(ids)
    assert embedded.dtype == np.float32
    np.testing.assert_array_equal(embedded, state["model.embed_tokens.weight"][ids])
    names = [spec.name for spec in loaded.weights.linears()]
    assert len(names) == len(set(names)) == 3 * 4 + 1


def test_embedding_checks_ids(saved_model: Saved) -> None:
    embed = load_model(saved_model("llama")[0]).weights.embed
    assert embed(np.array([], np.int64)).shape == (0, 64)
    for ids in (np.array([-1]), np.array([262]), np.array([[1]]), np.array([1], np.int32)):
        with pytest.raises(InvalidRequestError):
            embed(ids)


def test_oblivious_lookups_give_the_same_rows(saved_model: Saved) -> None:
    directory, _ = saved_model("llama")
    ids = np.array([3, 0, 3, 261], np.int64)
    plain, oblivious = (load_model(directory, oblivious_embedding=on).weights.embed for on in (False, True))
    np.testing.assert_array_equal(oblivious(ids), plain(ids))
    assert oblivious(np.array([], np.int64)).shape == (0, 64)
    with pytest.raises(InvalidRequestError):
        oblivious(np.array([262]))


def test_bfloat16_checkpoint(saved_model: Saved) -> None:
    directory, _ = saved_model("llama")
    rewrite(directory, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    tensors = load_file(directory / "model.safetensors")
    weights = load_model(directory).weights
    np.testing.assert_array_equal(
        weights.layers[0].down.load(), tensors["model.layers.0.mlp.down_proj.weight"].half().numpy()
    )
    np.testing.assert_array_equal(
        weights.embed(np.array([5])), tensors["model.embed_tokens.weight"][[5]].float().numpy()
    )


@pytest.mark.parametrize("value", [65520.0, -1e5, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_overflow_to_float16_is_an_error(value: float, dtype: Any) -> None:
    with pytest.raises(ModelError, match=r"some\.weight"):
        to_float16(np.array([[1.0, value]]).astype(dtype), name="some.weight")
    exact = to_float16(np.array([65504.0, -65504.0], np.float32), name="w")
    np.testing.assert_array_equal(exact, np.array([65504.0, -65504.0], np.float16))


def test_overflow_names_the_tensor_on_load(saved_model: Saved) -> None:
    directory, _ = saved_model("llama")
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(directory, lambda t: t[name].view(-1)[17:18].fill_(1e6))
    layer = load_model(directory).weights.layers[2]
    with pytest.raises(ModelError, match=name):
        layer.qkv.load()


def _head_copy(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def test_harmless_and_unexpected_tensors(saved_model: Saved) -> None:
    directory, _ = saved_model("llama", tie_word_embeddings=True)
    rewrite(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    rewrite(directory, _head_copy)
    load_model(directory)
    rewrite(directory, _other_head)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
        load_model(directory)
    rewrite(directory, _head_copy)
    rewrite(directory, lambda t: t.update({"model.layers.0.mlp.experts.0.w1": torch.ones(2)}))
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.w1"):
        load_model(directory)


def test_missing_misshapen_and_broken_tensors(saved_model: Saved) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    directory, _ = saved_model("llama")
    rewrite(directory, lambda t: t.update({name: t[name].T}))
    with pytest.raises(ModelError, match=r"up_proj\.weight' has shape \(64, 96\)"):
        load_model(directory)
    rewrite(directory, lambda t: t.pop(name))
    with pytest.raises(ModelError, match=f"lacks the tensor '{name}'"):
        load_model(directory)
    directory, _ = saved_model("llama")
    rewrite(directory, lambda t: t["model.norm.weight"][3:4].fill_(float("nan")))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_model(directory)


def test_shards_and_index(saved_model: Saved) -> None:
    directory, model = saved_model("qwen3", shard_size="60KB")
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    assert len(set(index["weight_map"].values())) > 2
    np.testing.assert_array_equal(
        load_model(directory).weights.final_norm, model.state_dict()["model.norm.weight"].numpy()
    )
    shard = index["weight_map"]["model.norm.weight"]
    other = next(name for name in index["weight_map"].values() if name != shard)
    wrong = {**index["weight_map"], "model.norm.weight": other}
    index_path.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Checkpoint(directory)
    missing = {**index["weight_map"], "model.ghost.weight": other}
    index_path.write_text(json.dumps({"weight_map": missing}))
    with pytest.raises(ModelError, match="ghost"):
        Checkpoint(directory)
    index_path.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        Checkpoint(directory)
    save_file({"a": torch.ones(1)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match="both"):
        Checkpoint(directory)


@pytest.mark.parametrize(
    "shard",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "x.safetensors\n",
        "..safetensors",
        "",
        None,
        3,
        ["m.safetensors"],
    ],
)
def test_index_names_only_plain_files(shard: object) -> None:
    with pytest.raises(ModelError):
        parse_index({"weight_map": {"a": shard}})


def test_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError):
        Checkpoint(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**ENTRY, "dtype": "I64"}},
        {"a": {**ENTRY, "shape": [3]}},
        {"a": {**ENTRY, "shape": [-2]}},
        {"a": {**ENTRY, "shape": [2**62, 2**62]}},
        {"a": {**ENTRY, "shape": [True]}},
        {"a": {**ENTRY, "data_offsets": [0, 16]}},
        {"a": {**ENTRY, "data_offsets": [8, 0]}},
        {"a": {**ENTRY, "data_offsets": [-8, 0]}},
        {"a": {**ENTRY, "extra": 1}},
        {"a": ENTRY, "b": ENTRY},
        {"a": [1]},
        {"\ud800": ENTRY},
        {},
    ],
)
def test_malformed_headers(header: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        parse_header(json.dumps(header).encode(), 8, 8)


def test_duplicate_names_in_a_header() -> None:
    entry = json.dumps(ENTRY)
    with pytest.raises(ModelError, match="twice"):
        parse_header(f'{{"a":{entry},"a":{entry}}}'.encode(), 8, 8)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200))
@example(data=struct.pack("<Q", 2**63))
@example(data=struct.pack("<Q", 2) + b"[]")
@example(data=struct.pack("<Q", 100_000) + b"[" * 100_000)
def test_hostile_bytes_give_only_model_errors(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError):
        SafetensorsFile(path)


FIELDS = st.sampled_from(["F16", "F32", "BF16"]) | st.lists(st.integers(-2, 40) | st.booleans(), max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries({"dtype": FIELDS, "shape": FIELDS, "data_offsets": FIELDS}) | FIELDS,
    ),
    size=st.integers(0, 64),
)
def test_hostile_headers_give_only_model_errors(header: dict[str, Any], size: int) -> None:
    try:
        entries = parse_header(json.dumps(header).encode(), 8, size)
    except ModelError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == size
    assert all(8 <= entry.offset <= entry.offset + entry.nbytes <= 8 + size for entry in entries.values())


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=64) | st.text(alphabet='{}[]":,0eE+-.nullNaN \\u', max_size=40).map(str.encode)
)
@example(data=b"9" * 5000)
@example(data=b'{"a":NaN}')
def test_hostile_json_gives_only_model_errors(data: bytes) -> None:
    try:
        weight_map = parse_index(parse_json_object(data, what="it"))
    except ModelError:
        return
    assert all("/" not in shard for shard in weight_map.values())
