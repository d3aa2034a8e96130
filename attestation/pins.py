"""UNPINNED: the one way to say on purpose that any value will do."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, TypeAlias, TypeVar


class Pin(Enum):
    """The one value of UNPINNED, as a type that a checker can tell from a pin."""

    UNPINNED = "unpinned"


UNPINNED: Final = Pin.UNPINNED
"""Written in place of an expectation, it says on purpose: any value will do, but show it to me."""

_T = TypeVar("_T")
PinnedOr: TypeAlias = _T | Literal[Pin.UNPINNED]
