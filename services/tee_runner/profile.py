"""Where the time of a forward pass goes, in a few buckets, at the cost of two clock reads each."""

from __future__ import annotations

from typing import Final, Literal, get_args

Bucket = Literal[
    "mask apply",
    "shield",
    "wire",
    "worker compute",
    "unapply",
    "check",
    "attention",
    "norms/rope/act",
    "sampling",
]
BUCKETS: Final[tuple[Bucket, ...]] = get_args(Bucket)


class Profile:
    """Nanoseconds per bucket since the start or the last reset. One thread adds, any reads.

    The buckets of a pass add up to its wall time. ``shield`` is making what operands are mixed or added
    with, ``mask apply`` using it. What the runner does while the worker computes
    is in ``shield`` and ``check``, so ``worker compute`` is only the rest of what the worker says
    it took (untrusted, for people), and ``wire`` the rest of the wait. Where one pass over a result
    both checks and unmasks it, that is in ``check``. ``norms/rope/act`` is what no other bucket
    took: the row-wise kernels and the interpreter.
    """

    __slots__ = ("nanoseconds",)

    def __init__(self) -> None:
        self.nanoseconds: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)

    def add(self, bucket: Bucket, nanoseconds: int) -> None:
        """Account ``nanoseconds`` to ``bucket``."""
        self.nanoseconds[bucket] += nanoseconds

    def meanwhile(self) -> int:
        """What was done while waiting for the worker so far: shields, and the check's own side."""
        return self.nanoseconds["shield"] + self.nanoseconds["check"]

    def total(self) -> int:
        """All buckets."""
        return sum(self.nanoseconds.values())

    def reset(self) -> None:
        """Start afresh."""
        for bucket in BUCKETS:
            self.nanoseconds[bucket] = 0
