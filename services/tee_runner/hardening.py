"""Keeps the process's memory out of core files and debuggers, and values out of tracebacks."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import traceback

_PR_SET_DUMPABLE = 4


def forbid_memory_dumps() -> None:
    """No core files, and no ptrace or /proc/PID/mem by other processes of the same user."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def where(error: BaseException) -> str:
    """Type and code locations of an unexpected exception, without its message.

    A message may quote a value (an index that is a token id, a piece of text); logs must not.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames[-8:])
    )
    return f"{type(error).__name__} at {places}"
