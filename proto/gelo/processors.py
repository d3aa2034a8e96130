"""Which processor the two services leave to whom when they share a machine.

Both spin for short waits. The worker's leading thread computes while the runner makes its next
secrets; on one processor, one would wait for the other. A scheduler that sees all processors
busy cannot know. So the leading thread takes the last processor, and the runner's thread keeps off it.
"""

from __future__ import annotations

import contextlib
import os


def processors() -> list[int]:
    """Those this thread may use, in order."""
    return sorted(os.sched_getaffinity(0))


def keep_to(chosen: list[int]) -> None:
    """Restrict the calling thread to ``chosen``; if they were taken away meanwhile, leave it as it is."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, set(chosen))


def keep_off_the_last() -> None:
    """Leave the last processor to others if there are two or more."""
    if len(available := processors()) > 1:
        keep_to(available[:-1])
