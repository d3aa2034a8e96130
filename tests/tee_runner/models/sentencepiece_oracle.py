"""The SentencePiece library as the reference for tokenizers that are rebuilt from GGUF metadata."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def train(corpus: list[str], *, vocab_size: int, user_defined: list[str]) -> Any:
    """A ``ModelProto`` trained with the settings of Gemma: BPE, byte fall-back, no normalisation."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.999,
        byte_fallback=True,
        user_defined_symbols=user_defined,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto


def metadata_of(proto: Any) -> dict[str, Any]:
    """The tokenizer keys that llama.cpp's converter writes for a Gemma ``ModelProto``."""
    pieces = [
        (piece.piece.replace(SPACE, " ") if piece.type == USER_DEFINED else piece.piece, piece)
        for piece in proto.pieces
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in pieces],
        "tokenizer.ggml.scores": [piece.score for _, piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for _, piece in pieces],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def proto_of(metadata: Mapping[str, Any]) -> Any:
    """The ``ModelProto`` that the metadata of a Gemma GGUF file came from."""
    proto = sentencepiece_model_pb2.ModelProto()
    columns = [metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    for token, score, kind in zip(*columns, strict=True):
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        piece.score, piece.type = score, kind
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    for role, name in roles.items():
        token_id = metadata[f"tokenizer.ggml.{name}_token_id"]
        setattr(proto.trainer_spec, f"{role}_id", token_id)
        setattr(proto.trainer_spec, f"{role}_piece", proto.pieces[token_id].piece)
    proto.pieces[proto.trainer_spec.unk_id].type = UNKNOWN  # the converter calls it a control token
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    return proto


def processor(proto: Any) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece itself, running ``proto``."""
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
