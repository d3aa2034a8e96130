"""What the processes of a run say to each other: see :mod:`evals.attacks.pool`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evals.attacks.model import CorpusName
from evals.attacks.results import CaptureRecord, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all tasks of a run have in common. ``source`` is the digest of the code, see :class:`Result`.

    ``shared``: a directory in which processes keep what follows from public facts alone.
    """

    directory: Path
    prompts: int
    seed: int
    source: str
    shared: Path


@dataclass(frozen=True, slots=True)
class Task:
    """The attacks of one condition that want one corpus."""

    condition: str
    corpus: CorpusName
    attacks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.condition}, {self.corpus}"


@dataclass(frozen=True, slots=True)
class Progressed:
    """What is running, and the fraction of it that is done."""

    current: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Captured:
    """The captures of a task are made."""

    record: CaptureRecord


@dataclass(frozen=True, slots=True)
class Attacked:
    """One attack is done, or raised."""

    attack: str
    result: Result


@dataclass(frozen=True, slots=True)
class Finished:
    """A task is done."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A task cannot be done."""

    message: str
    remedy: str


Message = Progressed | Captured | Attacked | Finished | Failed
