"""Deterministic CBOR (RFC 8949 section 4.2) for hostile input.

The general decoder of a CBOR library accepts tags that build dates, regular expressions, big
numbers and shared references. None of that belongs into evidence, so this decoder knows only
integers, byte and text strings, arrays, maps with text keys, booleans and finite floats, all of
definite length. Encoding is cbor2's canonical form, and a decoded value must encode to exactly
the bytes it came from: this one comparison refuses long forms, unsorted and duplicate keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import cbor2

from attestation.errors import MalformedEvidenceError

Value: TypeAlias = "int | float | bool | bytes | str | list[Value] | dict[str, Value]"
Encodable: TypeAlias = "int | float | bool | bytes | str | Sequence[Encodable] | Mapping[str, Encodable]"

MAX_DEPTH = 4
"""Evidence nests two levels; more is an attempt to exhaust the stack."""

MAX_ITEMS = 256
"""Items in all containers of one document together."""

_FLOATS = {25: (">e", 2), 26: (">f", 4), 27: (">d", 8)}


def encode(value: Encodable) -> bytes:
    """The canonical CBOR encoding of ``value``."""
    encoded: bytes = cbor2.dumps(value, canonical=True)
    return encoded


def decode(data: bytes, *, limit: int, what: str) -> Value:
    """Decode one canonical CBOR value of at most ``limit`` bytes.

    Raises:
        MalformedEvidenceError: too long, truncated, trailing bytes, an unknown type, or not
            the canonical encoding. ``what`` names the document in the message.
    """
    if len(data) > limit:
        raise MalformedEvidenceError(f"The {what} has {len(data)} bytes, more than the {limit} allowed.")
    decoder = _Decoder(data, what)
    value = decoder.value(0)
    if decoder.offset != len(data):
        raise decoder.malformed("has trailing bytes")
    if encode(value) != data:
        raise decoder.malformed("is not in canonical form")
    return value


def decode_map(
    data: bytes, *, keys: frozenset[str], optional: frozenset[str] = frozenset(), limit: int, what: str
) -> dict[str, Value]:
    """Like ``decode``, for a map that has exactly the given keys, and maybe ``optional`` ones."""
    value = decode(data, limit=limit, what=what)
    if not isinstance(value, dict):
        raise MalformedEvidenceError(f"The {what} is not a CBOR map.")
    wrong = len(keys - value.keys()) + len(value.keys() - keys - optional)
    if wrong:
        raise MalformedEvidenceError(f"The {what} has {wrong} missing or unknown keys.")
    return value


class _Decoder:
    """Cursor over one document."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.what, self.offset, self.items = data, what, 0, 0

    def malformed(self, why: str) -> MalformedEvidenceError:
        return MalformedEvidenceError(f"The {self.what} {why} (CBOR offset {self.offset}).")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.offset:
            raise self.malformed("is truncated")
        chunk = self.data[self.offset : self.offset + count]
        self.offset += count
        return chunk

    def argument(self, info: int) -> int:
        if info < 24:
            return info
        if info > 27:
            raise self.malformed("uses an indefinite or reserved length")
        return int.from_bytes(self.take(1 << (info - 24)), "big")

    def count(self, info: int) -> int:
        self.items += (number := self.argument(info))
        if self.items > MAX_ITEMS:
            raise self.malformed("has too many items")
        return number

    def text(self, info: int) -> str:
        try:
            return self.take(self.argument(info)).decode("utf-8")
        except UnicodeDecodeError:
            raise self.malformed("has a text string that is not UTF-8") from None

    def key(self) -> str:
        initial = self.take(1)[0]
        if initial >> 5 != 3:
            raise self.malformed("has a key that is not text")
        return self.text(initial & 31)

    def simple(self, info: int) -> bool | float:
        if info in (20, 21):
            return info == 21
        if info not in _FLOATS:
            raise self.malformed("has a simple value that is not allowed")
        layout, size = _FLOATS[info]
        number: float = struct.unpack(layout, self.take(size))[0]
        if not math.isfinite(number):
            raise self.malformed("has a number that is not finite")
        return number

    def value(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise self.malformed("is nested too deeply")
        initial = self.take(1)[0]
        major, info = initial >> 5, initial & 31
        if major == 0:
            return self.argument(info)
        if major == 1:
            return -1 - self.argument(info)
        if major == 2:
            return self.take(self.argument(info))
        if major == 3:
            return self.text(info)
        if major == 4:
            return [self.value(depth + 1) for _ in range(self.count(info))]
        if major == 5:
            return {self.key(): self.value(depth + 1) for _ in range(self.count(info))}
        if major == 7:
            return self.simple(info)
        raise self.malformed("uses a tag")
