"""Rebuild a byte-level BPE tokenizer (``tokenizer.ggml.model`` = ``gpt2``) from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_vocabulary import TokenType, Vocabulary

_TYPES: Final = frozenset({TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED})

# The split patterns are those of the models' own tokenizer.json files.
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's own fall-back for byte-level BPE, applied one after the other.
_DEFAULT_SPLITS: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """What ``tokenizer.ggml.pre`` stands for."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS: Final[dict[str, _PreTokenizer]] = {
    "smollm": _PreTokenizer(build=_smollm),
    "qwen2": _PreTokenizer(build=lambda: _splits(_QWEN2_SPLIT), nfc=True),
    "llama-bpe": _PreTokenizer(build=lambda: _splits(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True),
    "gpt-2": _PreTokenizer(build=_gpt2),
    "default": _PreTokenizer(build=lambda: _splits(*_DEFAULT_SPLITS)),
}


def byte_level_bpe(metadata: GgufMetadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a text begins with the begin token unless the metadata say otherwise.

    Raises ``UnsupportedModelError`` for an unknown ``tokenizer.ggml.pre`` and for token types that
    have no place in a byte-level BPE, and ``ModelError`` for merges that do not fit the vocabulary.
    """
    name = metadata.string("tokenizer.ggml.pre")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"GGUF tokenizer.ggml.pre = {name!r} is not supported (one of {', '.join(_PRE_TOKENIZERS)} is)."
        )
    if metadata.boolean("tokenizer.ggml.add_space_prefix", default=False):
        raise UnsupportedModelError("GGUF tokenizer.ggml.add_space_prefix = True is not supported.")
    vocabulary.refuse_other_types(_TYPES, "a byte-level BPE")
    merges = _merges(metadata, vocabulary.tokens)
    try:
        model = models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"The GGUF vocabulary and merges do not form a BPE model: {error}.") from error
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens(tokenizer)
    tokenizer.add_tokens(vocabulary.added(TokenType.USER_DEFINED, normalized=False))
    return tokenizer, pre.add_bos


def _merges(metadata: GgufMetadata, tokens: list[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(metadata.strings("tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in known or right not in known or left + right not in known:
            raise ModelError(f"GGUF tokenizer.ggml.merges[{number}] does not join two tokens into a third.")
        merges.append((left, right))
    return merges
