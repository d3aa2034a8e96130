"""How long-running model work (download, import, load, hashing) tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with a stage name and two counters, ``done`` of ``total`` units of that stage."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` units of ``stage`` are finished."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""
