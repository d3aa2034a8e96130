"""Rebuild a SentencePiece BPE tokenizer (``tokenizer.ggml.model`` = ``llama``) from GGUF metadata.

SentencePiece replaces spaces by U+2581, cuts out the user-defined pieces (longest match, left to
right), and joins in what remains the adjacent pair whose union is the piece of the highest score,
until no union is a piece. Characters that are no piece become one byte piece for each of their
UTF-8 bytes. Here the scores become a list of merges, ordered by the score of what they make, and
the user-defined pieces are found on the text with its spaces replaced.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_vocabulary import TokenType, Vocabulary

SPACE: Final = "\u2581"
MAX_PIECE_CHARS: Final = 256  # SentencePiece's own default limit is 16
_TYPES: Final = frozenset(TokenType)
_BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


def sentencepiece_bpe(metadata: GgufMetadata, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that encodes as SentencePiece does with the identity normalisation.

    Raises ``UnsupportedModelError`` for what Gemma does not use (a space put before the text, a
    table of character replacements, collapsing of spaces), and ``ModelError`` for a vocabulary
    without the 256 byte pieces or with scores that do not fit it.
    """
    _refuse_unsupported(metadata)
    vocabulary.refuse_other_types(_TYPES, "a SentencePiece BPE")
    vocabulary = _escaped(vocabulary)
    _check_bytes(vocabulary)
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"The GGUF vocabulary has {len(vocabulary.tokens)} tokens and {len(scores)} scores.")
    try:
        model = models.BPE(vocab=vocabulary.ids(), merges=_merges(vocabulary, scores), byte_fallback=True)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"The GGUF vocabulary does not form a BPE model: {error}.") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    vocabulary.add_special_tokens(tokenizer)
    tokenizer.add_tokens(vocabulary.added(TokenType.USER_DEFINED, normalized=True))
    return tokenizer


def _refuse_unsupported(metadata: GgufMetadata) -> None:
    # llama.cpp takes an absent key for true.
    for key, default in (("add_space_prefix", True), ("remove_extra_whitespaces", False)):
        if metadata.boolean(f"tokenizer.ggml.{key}", default=default):
            raise UnsupportedModelError(f"GGUF tokenizer.ggml.{key} = True is not supported.")
    if "tokenizer.ggml.precompiled_charsmap" in metadata:
        raise UnsupportedModelError("GGUF tokenizer.ggml.precompiled_charsmap is not supported.")


def _escaped(vocabulary: Vocabulary) -> Vocabulary:
    """User-defined pieces as SentencePiece spells them: llama.cpp stores their spaces as such."""
    tokens = list(vocabulary.tokens)
    for i in vocabulary.of(TokenType.USER_DEFINED):
        tokens[i] = tokens[i].replace(" ", SPACE)
    if len(set(tokens)) != len(tokens):
        raise ModelError("The GGUF vocabulary lists a token twice, once with and once without spaces.")
    return Vocabulary(tokens, vocabulary.types)


def _check_bytes(vocabulary: Vocabulary) -> None:
    found = sorted(vocabulary.tokens[i] for i in vocabulary.of(TokenType.BYTE))
    if found != sorted(_BYTES):
        raise ModelError(f"The GGUF vocabulary has {len(found)} byte tokens, not one for each byte.")


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, best score first, then by id."""
    normal = {vocabulary.tokens[i]: i for i in vocabulary.of(TokenType.NORMAL)}
    merges: list[tuple[float, int, int, str]] = []
    for piece, i in normal.items():
        if len(piece) > MAX_PIECE_CHARS:
            raise ModelError(f"GGUF token {i} has {len(piece)} characters (limit {MAX_PIECE_CHARS}).")
        for cut in range(1, len(piece)):
            if piece[:cut] in normal and piece[cut:] in normal:
                merges.append((-scores[i], i, cut, piece))
    merges.sort()
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in merges]
