"""What follows from public facts alone is computed once, for all conditions and processes of a run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from evals.attacks.public import PublicModel

T = TypeVar("T")

_made: WeakKeyDictionary[PublicModel, dict[Hashable, Any]] = WeakKeyDictionary()
_directory: list[Path] = []


def share(directory: Path | None) -> None:
    """Keep values in ``directory``, too, where other processes with the same model find them.

    Only this user may write there: values are pickled. None: in memory only.
    """
    _directory[:] = [] if directory is None else [directory]


def kept(model: PublicModel, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """``make()``, once for each model and ``key``, whose ``repr`` must tell it from all others.

    While another process makes the same value this one waits.
    """
    made = _made.setdefault(model, {})
    if key not in made:
        made[key] = _on_disk(_directory[0], key, make) if _directory else make()
    value: T = made[key]
    return value


def _on_disk(directory: Path, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    path = directory / hashlib.sha256(repr(key).encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            value: T = pickle.loads(path.read_bytes())  # noqa: S301 - written by this run
            return value
        value = make()
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        os.replace(partial, path)
        return value
