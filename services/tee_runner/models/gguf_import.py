"""Import a GGUF file as a model directory in the Hugging Face layout.

Weights are dequantised, what llama.cpp did to them is undone (the row permutation of the query and
key projections, the offset of Gemma's norms), and configuration and tokenizer are rebuilt from the
metadata. Whatever the metadata say that this decoder does not implement is refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import numpy as np

from tee_runner.errors import ModelError
from tee_runner.models.gguf_file import GgufFile
from tee_runner.models.gguf_layout import ARCHITECTURES, Shape, TensorPlan, plan_tensors, read_shape
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_tokenizer import ImportedTokenizer, build_tokenizer
from tee_runner.models.half import to_float16
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.safetensors_file import DTYPES, Array, TensorSource, write_safetensors

TargetDtype = Literal["float16", "float32"]

# Elements dequantised at a time, so that an embedding table is never held in float32 as a whole.
_CHUNK: Final = 1 << 23


def import_gguf(
    path: Path, destination: Path, *, dtype: TargetDtype = "float16", progress: Progress = no_progress
) -> Path:
    """Write the model in the GGUF file ``path`` as the new directory ``destination``.

    Architectures ``llama``, ``qwen3`` and ``gemma3``. Matrices are stored as ``dtype``, vectors as
    float32. The directory appears whole or not at all: it is written beside its destination and
    renamed.

    Raises ``ModelError`` for a malformed file, a weight beyond the range of ``dtype``, or a
    destination that exists; ``UnsupportedModelError`` for anything this decoder does not implement.
    """
    if dtype not in ("float16", "float32"):
        raise ModelError(f"Cannot import as {dtype!r}.", remedy="Choose float16 or float32.")
    if destination.exists():
        raise ModelError(f"{destination} exists already.", remedy="Remove it or choose another directory.")
    file = GgufFile(path)
    metadata = GgufMetadata(file.metadata)
    shape = read_shape(file, metadata)
    tokenizer = build_tokenizer(metadata, context_length=shape.context)
    plan, tied = plan_tensors(file, shape, tokenizer.vocab_size)
    config = _config(shape, tokenizer, dtype=dtype, tied=tied)

    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(
        tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.", suffix=".partial")
    )
    try:
        _write_text_files(partial, config, tokenizer)
        write_safetensors(
            partial / "model.safetensors",
            _sources(file, plan, dtype),
            progress=lambda done, total: progress("import", done, total),
        )
        partial.chmod(0o755)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def _sources(file: GgufFile, plan: dict[str, TensorPlan], dtype: TargetDtype) -> dict[str, TensorSource]:
    matrix = "F16" if dtype == "float16" else "F32"

    def loader(name: str, tensor: TensorPlan, stored: str) -> Callable[[], Array]:
        return lambda: _convert(file, name, tensor, stored)

    sources: dict[str, TensorSource] = {}
    for name, tensor in plan.items():
        stored = matrix if len(tensor.shape) == 2 else "F32"
        sources[name] = TensorSource(stored, tensor.shape, loader(name, tensor, stored))
    return sources


def _convert(file: GgufFile, name: str, tensor: TensorPlan, stored: str) -> Array:
    """The tensor as it is to be stored, dequantised a block of rows at a time."""
    result = np.empty(tensor.shape, DTYPES[stored])
    step = max(1, _CHUNK // (result.size // len(result)))
    for start in range(0, len(result), step):
        rows = slice(start, min(start + step, len(result)))
        values = file.read(tensor.source, rows=rows)
        if not np.isfinite(values).all():
            raise ModelError(f"GGUF tensor {tensor.source!r} holds values that are not finite.")
        if tensor.offset:
            values += np.float32(tensor.offset)
        if stored == "F16":
            to_float16(values, name=name, out=result[rows])
        else:
            result[rows] = values
    return result if tensor.unpermute_heads is None else _unpermute(result, tensor.unpermute_heads)


def _unpermute(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's interleaving of rotary pairs within each head: ``(heads * d, d_in)``."""
    rows, d_in = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, d_in).swapaxes(1, 2).reshape(rows, d_in)


def _config(
    shape: Shape, tokenizer: ImportedTokenizer, *, dtype: TargetDtype, tied: bool
) -> dict[str, object]:
    gemma = shape.architecture is ARCHITECTURES["gemma3"]
    config: dict[str, object] = {
        "architectures": [shape.architecture.hf_name],
        "model_type": shape.architecture.model_type,
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        **({"hidden_activation": "gelu_pytorch_tanh"} if gemma else {"hidden_act": "silu"}),
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_parameters": shape.rope,
        **shape.extra,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    if shape.architecture is ARCHITECTURES["llama"]:
        config["mlp_bias"] = False
    return {key: value for key, value in config.items() if value is not None}


def _write_text_files(directory: Path, config: dict[str, object], tokenizer: ImportedTokenizer) -> None:
    generation = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    texts = {
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "tokenizer.json": tokenizer.tokenizer_json,
        "tokenizer_config.json": json.dumps(tokenizer.tokenizer_config, indent=2, ensure_ascii=False) + "\n",
    }
    if tokenizer.chat_template is not None:
        texts["chat_template.jinja"] = tokenizer.chat_template
    for name, text in texts.items():
        with (directory / name).open("x", encoding="utf-8", newline="") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
