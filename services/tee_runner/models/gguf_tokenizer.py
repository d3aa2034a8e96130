"""Rebuild a byte-level BPE tokenizer (``tokenizer.json``) from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.gguf_metadata import GgufMetadata

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_NORMAL_TYPES: Final = frozenset({1, _CONTROL, _USER_DEFINED, _UNUSED})

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

    Raises ``UnsupportedModelError`` for a tokenizer model other than ``gpt2`` (byte-level BPE) or
    an unknown ``tokenizer.ggml.pre``, and ``ModelError`` for inconsistent vocabulary data.
    """
    kind = metadata.string("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"GGUF tokenizer.ggml.model = {kind!r} is not supported (only 'gpt2' is)."
        )
    name = metadata.string("tokenizer.ggml.pre")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"GGUF tokenizer.ggml.pre = {name!r} is not supported (one of {', '.join(_PRE_TOKENIZERS)} is)."
        )
    if metadata.boolean("tokenizer.ggml.add_space_prefix", default=False):
        raise UnsupportedModelError("GGUF tokenizer.ggml.add_space_prefix = True is not supported.")
    tokens, types = _vocabulary(metadata)
    tokenizer = _bpe(tokens, types, _merges(metadata, tokens), pre)

    ids = {
        role: metadata.optional_integer(f"tokenizer.ggml.{role}_token_id", low=0, high=len(tokens) - 1)
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", default=pre.add_bos)
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


def _vocabulary(metadata: GgufMetadata) -> tuple[list[str], list[int]]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"The GGUF vocabulary has {len(tokens)} tokens and {len(types)} token types.")
    if len(set(tokens)) != len(tokens):
        raise ModelError("The GGUF vocabulary lists a token twice.")
    strange = set(types) - _NORMAL_TYPES
    if strange:
        raise UnsupportedModelError(f"GGUF token type {min(strange)} is not supported in a byte-level BPE.")
    return tokens, types


def _merges(metadata: GgufMetadata, tokens: list[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(metadata.strings("tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in known or right not in known or left + right not in known:
            raise ModelError(f"GGUF tokenizer.ggml.merges[{number}] does not join two tokens into a third.")
        merges.append((left, right))
    return merges


def _bpe(tokens: list[str], types: list[int], merges: list[tuple[str, str]], pre: _PreTokenizer) -> Tokenizer:
    # Unused entries only pad the embedding table: as tokens they could be typed by a client.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"The GGUF vocabulary and merges do not form a BPE model: {error}.") from error
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


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
