"""The vocabulary of a GGUF file: token texts and their types."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.gguf_metadata import GgufMetadata


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, numbered as in SentencePiece's ``ModelProto.SentencePiece.Type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts and types, in order of their ids."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """Token to id, without the unused ones.

        Those only pad the embedding table: as tokens they could be typed by a client.
        """
        return {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != TokenType.UNUSED
        }

    def of(self, kind: TokenType) -> list[int]:
        """The ids of all tokens of type ``kind``."""
        return [i for i, found in enumerate(self.types) if found == kind]

    def added(self, kind: TokenType, *, normalized: bool) -> list[AddedToken]:
        """The tokens of type ``kind``, to be found whole in a text: as it is, or once ``normalized``."""
        return [AddedToken(self.tokens[i], special=False, normalized=normalized) for i in self.of(kind)]

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Add the control tokens: found in a text as it is, left out when text is decoded."""
        tokenizer.add_special_tokens(
            [AddedToken(self.tokens[i], special=True, normalized=False) for i in self.of(TokenType.CONTROL)]
        )

    def refuse_other_types(self, allowed: Set[int], where: str) -> None:
        """Raise ``UnsupportedModelError`` for a token whose type is not ``allowed``."""
        strange = set(self.types) - allowed
        if strange:
            raise UnsupportedModelError(f"GGUF token type {min(strange)} is not supported in {where}.")


def read_vocabulary(metadata: GgufMetadata) -> Vocabulary:
    """The vocabulary that the metadata hold.

    Raises ``ModelError`` when it is empty, names a token twice or has not one type for each token.
    """
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"The GGUF vocabulary has {len(tokens)} tokens and {len(types)} token types.")
    if len(set(tokens)) != len(tokens):
        raise ModelError("The GGUF vocabulary lists a token twice.")
    return Vocabulary(tokens, types)
