"""Typed reading of TOML and JSON from outside: every key required, none unknown, nothing coerced."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import TypeVar

from attestation.errors import InvalidPolicyError

T = TypeVar("T")

MAX_DATA_SIZE = 256 * 1024
MAX_ITEMS = 1024
_REMEDY = "Correct the file; docs/attestation.md describes every key."


def invalid(message: str) -> InvalidPolicyError:
    """The error for a value that cannot be right."""
    return InvalidPolicyError(message, remedy=_REMEDY)


def parse_toml(data: bytes, what: str) -> Mapping[str, object]:
    """A TOML document as a mapping.

    Raises:
        InvalidPolicyError: too large, not UTF-8 or not TOML.
    """
    try:
        return tomllib.loads(_text(data, what))
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a plain ValueError
        raise invalid(f"The {what} is not valid TOML ({_first_line(error)}).") from None


def parse_json(data: bytes, what: str) -> Mapping[str, object]:
    """A JSON object as a mapping; a key that occurs twice is an error.

    Raises:
        InvalidPolicyError: too large, not UTF-8, not JSON, or not an object.
    """
    try:
        value = json.loads(_text(data, what), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The {what} is not valid JSON ({_first_line(error)}).") from None
    if not isinstance(value, dict):
        raise invalid(f"The {what} is not a JSON object.")
    return value


def _text(data: bytes, what: str) -> str:
    if len(data) > MAX_DATA_SIZE:
        raise invalid(f"The {what} has {len(data)} bytes.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(f"The {what} is not UTF-8.") from None


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


class Table:
    """A mapping whose every key must be read exactly as expected; ``close`` refuses what is left.

    ``path`` leads to the mapping in messages, for instance ``platform.``.
    """

    def __init__(self, values: object, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise invalid(f"{path.rstrip('.') or 'The document'} must be a table.")
        self._values = dict(values)
        self._path = path

    def name(self, key: str) -> str:
        """The full path of ``key``."""
        return f"{self._path}{key}"

    def take(self, key: str, kind: type[T]) -> T:
        """The value of ``key``, which must be there and of exactly this type.

        Raises:
            InvalidPolicyError: absent or of another type (a boolean is no integer).
        """
        if key not in self._values:
            raise invalid(f"{self.name(key)} is missing: an expectation cannot be left out.")
        value = self._values.pop(key)
        if kind is not object and type(value) is not kind:
            raise invalid(f"{self.name(key)} must be of type {kind.__name__}, not {type(value).__name__}.")
        return value  # type: ignore[no-any-return]

    def take_any(self, key: str) -> object:
        """The value of ``key``, which must be there.

        Raises:
            InvalidPolicyError: absent.
        """
        return self.take(key, object)

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and was not read yet."""
        return key in self._values

    def table(self, key: str) -> Table:
        """The table under ``key``.

        Raises:
            InvalidPolicyError: absent or not a table.
        """
        return Table(self.take(key, dict), f"{self.name(key)}.")

    def integer(self, key: str, low: int, high: int) -> int:
        """The integer under ``key``, within ``low`` and ``high``.

        Raises:
            InvalidPolicyError: absent, not an integer, or out of range.
        """
        value = self.take(key, int)
        if not low <= value <= high:
            raise invalid(f"{self.name(key)} must be from {low} to {high}.")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """The list under ``key``, whose every element has exactly this type.

        Raises:
            InvalidPolicyError: absent, not a list, too long, or an element of another type.
        """
        values = self.take(key, list)
        if len(values) > MAX_ITEMS:
            raise invalid(f"{self.name(key)} has {len(values)} elements.")
        for value in values:
            if type(value) is not kind:
                raise invalid(f"{self.name(key)} must hold {kind.__name__} only, not {type(value).__name__}.")
        return values

    def integers(self, key: str, length: int, high: int) -> tuple[int, ...]:
        """``length`` integers from 0 to ``high``.

        Raises:
            InvalidPolicyError: absent or not that.
        """
        values = self.items(key, int)
        if len(values) != length or not all(0 <= value <= high for value in values):
            raise invalid(f"{self.name(key)} must be {length} integers from 0 to {high}.")
        return tuple(values)

    def close(self) -> None:
        """Raises InvalidPolicyError if a key was not read: it would otherwise be an expectation ignored."""
        if self._values:
            unknown = ", ".join(sorted(map(str, self._values)))
            raise invalid(f"{self._path.rstrip('.') or 'The document'} has unknown keys: {unknown[:200]}.")
