"""A model's tokenizer: text to ids, ids to text, conversations to prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from tee_runner.errors import InvalidRequestError, ModelError
from tee_runner.models.chat_template import ChatTemplate
from tee_runner.models.config_fields import shown
from tee_runner.models.detokenizer import IncrementalDecoder
from tee_runner.models.json_file import read_bytes, read_json_object

MAX_EOS_IDS: Final = 64
_TEMPLATE_FILE: Final = "chat_template.jinja"
_MAX_TEMPLATE_BYTES: Final = 4_000_000
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL_ROLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of a model directory (``tokenizer.json`` and the files that go with it).

    Raises ``ModelError`` when the directory holds none, or a malformed one.
    """

    def __init__(self, directory: Path) -> None:
        data = read_bytes(directory / "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}.") from None
        # A truncation or padding stored with the file would silently change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _optional_json(directory / "tokenizer_config.json")
        self.special_tokens: dict[str, str] = _special_tokens(settings)
        self.chat_template: ChatTemplate | None = _chat_template(directory, settings)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ModelError(f"{directory / 'tokenizer.json'} has an empty vocabulary.")
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._byte_ids = self._byte_fallback_ids(vocabulary)
        self.bos_id: int | None = self._role_id("bos_token")
        self.eos_ids: frozenset[int] = self._read_eos_ids(directory)

    def _byte_fallback_ids(self, vocabulary: Mapping[str, int]) -> frozenset[int]:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
        if not any(step.get("type") == "ByteFallback" for step in steps):
            return frozenset()
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _read_eos_ids(self, directory: Path) -> frozenset[int]:
        """Ids that end a text: all that the generation, model and tokenizer configurations name."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _optional_json(directory / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if len(ids) > MAX_EOS_IDS or not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
                raise ModelError(f"{name}: eos_token_id = {shown(value)} is not a list of token ids.")
            found.update(ids)
        if (eos := self._role_id("eos_token")) is not None:
            found.add(eos)
        return frozenset(found)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        Names of special tokens in the text become those tokens, as chat templates need.
        ``add_special_tokens`` puts the begin or end token around it where the model wants one.
        Raises ``InvalidRequestError`` when the text is not valid Unicode.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError("The text is not valid Unicode.") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, unknown ids leave nothing.

        Raises ``InvalidRequestError`` for an id that is negative or not below ``vocab_size``.
        """
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidRequestError(f"A token id lies outside the vocabulary of {self.vocab_size}.")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A fresh streaming detokeniser that yields in pieces what ``decode`` yields at once."""
        return IncrementalDecoder(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens),
            skipped=self.special_ids if skip_special_tokens else (),
            byte_ids=self._byte_ids,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens.

        Raises ``InvalidRequestError`` for a conversation that is malformed or that the template
        refuses, or when the model has no template, and ``ModelError`` when the template fails.
        """
        if self.chat_template is None:
            raise InvalidRequestError("This model has no chat template.", remedy="Use plain completion.")
        return self.chat_template.render(
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for role in _SPECIAL_ROLES:
        value = settings.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ModelError(f"tokenizer_config.json: {role} = {shown(value)} is not a token.")
        tokens[role] = value
    return tokens


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    path = directory / _TEMPLATE_FILE
    if path.exists():
        try:
            return ChatTemplate(read_bytes(path, limit=_MAX_TEMPLATE_BYTES).decode("utf-8"))
        except UnicodeDecodeError:
            raise ModelError(f"{path} is not UTF-8.") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is None:
        return None
    if not isinstance(value, str):
        raise ModelError("tokenizer_config.json: chat_template is not a string.")
    return ChatTemplate(value)
