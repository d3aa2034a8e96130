"""Write GGUF files from small transformers models, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's reordering of query and key rows, for its interleaved rotary embedding."""
    rows, d_in = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, d_in).swapaxes(1, 2).reshape(rows, d_in)


def tensors_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """GGUF name to float32 array for every tensor of a transformers model."""
    config = model.config
    result: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if config.model_type == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                result["output.weight"] = values
        elif name == "model.embed_tokens.weight":
            result["token_embd.weight"] = values
        elif name == "model.norm.weight":
            result["output_norm.weight"] = values
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            result[f"blk.{layer}.{NAMES[part]}.weight"] = values
    return result


def metadata_of(model: Any, vocab: list[str], merges: list[tuple[str, str]], specials: int) -> dict[str, Any]:
    """GGUF metadata of a transformers model with a byte-level BPE whose last tokens are special."""
    config = model.config
    arch = config.model_type
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if arch == "qwen3" else "smollm",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [1] * (len(vocab) - specials) + [3] * specials,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(vocab) - 2,
        "tokenizer.ggml.eos_token_id": len(vocab) - 1,
    }


def write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A GGUF file with these contents; integers become uint32, floats float32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
