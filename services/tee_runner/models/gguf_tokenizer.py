"""Rebuild a model's tokenizer (``tokenizer.json``) from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, processors

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.gguf_byte_level import byte_level_bpe
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_sentencepiece import sentencepiece_bpe
from tee_runner.models.gguf_vocabulary import read_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTokenizer:
    """A tokenizer rebuilt from GGUF metadata, as the files of a model directory."""

    tokenizer_json: str
    tokenizer_config: dict[str, object]
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    vocab_size: int


def build_tokenizer(metadata: GgufMetadata, *, context_length: int) -> ImportedTokenizer:
    """The tokenizer that the GGUF metadata describe.

    Raises ``UnsupportedModelError`` for a tokenizer model other than ``gpt2`` (byte-level BPE) and
    ``llama`` (SentencePiece BPE) or for options of theirs that are not implemented, and
    ``ModelError`` for inconsistent vocabulary data.
    """
    kind = metadata.string("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"GGUF tokenizer.ggml.model = {kind!r} is not supported ('gpt2' and 'llama' are)."
        )
    vocabulary = read_vocabulary(metadata)
    tokens = vocabulary.tokens
    if kind == "gpt2":
        tokenizer, bos_expected = byte_level_bpe(metadata, vocabulary)
    else:
        tokenizer, bos_expected = sentencepiece_bpe(metadata, vocabulary), True

    ids = {
        role: metadata.optional_integer(f"tokenizer.ggml.{role}_token_id", low=0, high=len(tokens) - 1)
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", default=bos_expected)
    add_eos = metadata.boolean("tokenizer.ggml.add_eos_token", default=False)
    _frame(tokenizer, tokens, ids["bos"] if add_bos else None, ids["eos"] if add_eos else None)
    if (add_bos and ids["bos"] is None) or (add_eos and ids["eos"] is None):
        raise ModelError("The GGUF tokenizer adds a begin or end token whose id it does not declare.")

    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    for role, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token_id = ids[role]
        if token_id is not None:
            config[key] = tokens[token_id]
    return ImportedTokenizer(
        tokenizer_json=tokenizer.to_str(pretty=False),
        tokenizer_config=config,
        chat_template=_chat_template(metadata),
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(i for role in ("eos", "eot", "eom") if (i := ids[role]) is not None)),
        pad_id=ids["padding"],
        vocab_size=len(tokens),
    )


def _frame(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Make ``encode`` put the begin and end tokens around a text, where the model wants them."""
    if bos is None and eos is None:
        return
    begin = [] if bos is None else [f"{tokens[bos]}:0"]
    end = [] if eos is None else [f"{tokens[eos]}:0"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A:0", *end],
        pair=[
            *begin,
            "$A:0",
            *end,
            *(part[:-1] + "1" for part in begin),
            "$B:1",
            *(p[:-1] + "1" for p in end),
        ],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys((bos, eos)) if i is not None],
    )


def _chat_template(metadata: GgufMetadata) -> str | None:
    key = "tokenizer.chat_template"
    return metadata.string(key) if key in metadata else None
