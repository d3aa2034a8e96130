"""A token bucket, for work that is cheap to ask for and dear to do (a signature of the PSP)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets ``burst`` calls through at once and ``rate`` per second on average. Thread-safe.

    ``clock`` returns monotonic seconds.
    """

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError("A token bucket needs a positive rate and a burst of at least one.")
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._last = float(burst), clock()
        self._lock = threading.Lock()

    def try_take(self) -> float:
        """Take a token. Returns 0.0, or, if there is none, the seconds until there will be one."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
            self._last = now
            if self._tokens >= 1:
                self._tokens -= 1
                return 0.0
            return (1 - self._tokens) / self._rate
