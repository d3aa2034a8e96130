"""Typed access to GGUF metadata: each value is checked for type and bounds where it is read."""

from __future__ import annotations

import math
from typing import Final

from tee_runner.errors import ModelError
from tee_runner.models.gguf_file import Value

_MISSING: Final = "The GGUF metadata lacks the key {!r}."


class GgufMetadata:
    """A view of GGUF metadata that remembers which keys were used.

    Every getter raises ``ModelError`` naming the key when it is missing (and no default was
    given), of the wrong type or out of bounds.
    """

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> list[str]:
        """All keys, in file order."""
        return list(self._values)

    def _get(self, key: str) -> Value | None:
        self.used.add(key)
        return self._values.get(key)

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """The integer ``key`` within ``low..high``."""
        value = self._get(key)
        if value is None:
            if default is None:
                raise ModelError(_MISSING.format(key))
            return default
        if type(value) is not int or not low <= value <= high:
            raise ModelError(f"GGUF {key} = {_shown(value)} is not an integer within {low}..{high}.")
        return value

    def optional_integer(self, key: str, *, low: int, high: int) -> int | None:
        """The integer ``key`` within ``low..high``, or None when it is absent."""
        return self.integer(key, low=low, high=high) if key in self._values else None

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """The finite number ``key`` within ``low..high``."""
        value = self._get(key)
        if value is None:
            if default is None:
                raise ModelError(_MISSING.format(key))
            return default
        if type(value) not in (int, float):
            raise ModelError(f"GGUF {key} = {_shown(value)} is not a number.")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or not low <= number <= high:
            raise ModelError(f"GGUF {key} = {number!r} is not within {low}..{high}.")
        return number

    def boolean(self, key: str, *, default: bool) -> bool:
        """The boolean ``key``."""
        value = self._get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise ModelError(f"GGUF {key} = {_shown(value)} is not a boolean.")
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        """The string ``key``."""
        value = self._get(key)
        if value is None:
            if default is None:
                raise ModelError(_MISSING.format(key))
            return default
        if type(value) is not str:
            raise ModelError(f"GGUF {key} = {_shown(value)} is not a string.")
        return value

    def strings(self, key: str) -> list[str]:
        """The array of strings ``key``."""
        value = self._get(key)
        if value is None:
            raise ModelError(_MISSING.format(key))
        if not isinstance(value, list):
            raise ModelError(f"GGUF {key} is not an array of strings.")
        strings = [item for item in value if type(item) is str]
        if len(strings) != len(value):
            raise ModelError(f"GGUF {key} is not an array of strings.")
        return strings

    def numbers(self, key: str) -> list[float]:
        """The array of finite numbers ``key``."""
        value = self._get(key)
        if value is None:
            raise ModelError(_MISSING.format(key))
        if not isinstance(value, list):
            raise ModelError(f"GGUF {key} is not an array of numbers.")
        numbers = [float(item) for item in value if type(item) in (int, float)]
        if len(numbers) != len(value) or not all(map(math.isfinite, numbers)):
            raise ModelError(f"GGUF {key} is not an array of finite numbers.")
        return numbers

    def integers(self, key: str) -> list[int]:
        """The array of integers ``key``."""
        value = self._get(key)
        if value is None:
            raise ModelError(_MISSING.format(key))
        if not isinstance(value, list):
            raise ModelError(f"GGUF {key} is not an array of integers.")
        integers = [item for item in value if type(item) is int]
        if len(integers) != len(value):
            raise ModelError(f"GGUF {key} is not an array of integers.")
        return integers


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
