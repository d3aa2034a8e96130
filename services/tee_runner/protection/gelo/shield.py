"""Shield rows: a small stock of standard normals, refilled while the worker computes.

Shield rows do not depend on what they hide, so the next offload's are made during the wait
for this one's result, when this thread has nothing else to do. Every normal is used once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tee_runner.memory import on_lines
from tee_runner.protection.gaussian import fill_normals
from tee_runner.protection.rng import SecretStream

# The stock grows to what is asked for between two refills, up to this: 4 MiB, more than any decode
# step needs. Larger demands are made when they come.
_MAX_STOCK = 1 << 20


class ShieldStock:
    """Independent standard normals from one secret stream. Not thread-safe."""

    def __init__(self, stream: SecretStream) -> None:
        self._stream = stream
        self._stock: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        # Entries before this index are used up.
        self._used = 0
        # Asked for since the last refill or the start of the pass; at once at most, in the pass before
        # and this one, and in this one.
        self._demand = 0
        self._largest = 0
        self._largest_now = 0
        self._extra: list[NDArray[np.float32]] = []

    @property
    def low(self) -> bool:
        """Whether less is left than is taken at once, of what a stock can hold."""
        return self._stock.size - self._used < min(self._largest, _MAX_STOCK)

    def take(self, count: int) -> NDArray[np.float32]:
        """``count`` fresh normals, float32. Valid until a refill, a top-up or :meth:`wipe`."""
        self._demand += count
        self._largest_now = max(self._largest_now, count)
        self._largest = max(self._largest, count)
        if self._stock.size - self._used >= count:
            self._used += count
            return self._stock[self._used - count : self._used]
        extra = on_lines(count, np.float32)
        fill_normals(self._stream, extra)
        self._extra.append(extra)
        return extra

    def refill(self) -> bool:
        """:meth:`top_up`, and grow to what was asked for since the last refill and some more."""
        demand, self._demand = self._demand, 0
        return self._fill(demand + self._largest)

    def top_up(self) -> bool:
        """Replace what was used, and grow to what is taken at once; False if there is nothing to do."""
        return self._fill(self._largest)

    def _fill(self, wanted: int) -> bool:
        self._drop_extra()
        size = min(wanted, _MAX_STOCK)
        if size > self._stock.size:
            self._stock.fill(0.0)
            self._stock = on_lines(size, np.float32)
            self._used = size
        if not self._used:
            return False
        fill_normals(self._stream, self._stock[: self._used])
        self._used = 0
        return True

    def _drop_extra(self) -> None:
        for extra in self._extra:
            extra.fill(0.0)
        self._extra.clear()

    def wipe(self) -> None:
        """At the end of a pass: overwrite used normals and step the stream, so that none can be remade."""
        self._demand = 0
        self._largest, self._largest_now = self._largest_now, 0
        self._stock[: self._used] = 0.0
        self._drop_extra()
        self._stream.ratchet()
