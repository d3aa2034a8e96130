"""Keys and values of every sequence, in the runner's memory."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.config import DecoderConfig
from tee_runner.errors import CapacityError

KvDtype = Literal["float32", "bfloat16"]


class KvCache:
    """``keys[layer]`` and ``values[layer]`` are ``(slots, max_len, kv_dim)``.

    float32, or bfloat16 as its uint16 bits. Each slot grows at its own pace; memory is
    committed by the kernel only as positions are written.
    """

    def __init__(
        self, config: DecoderConfig, *, slots: int, max_len: int, dtype: KvDtype = "float32"
    ) -> None:
        shape = (slots, max_len, config.kv_dim)
        stored = np.float32 if dtype == "float32" else np.uint16
        self.keys = [np.zeros(shape, dtype=stored) for _ in range(config.num_layers)]
        self.values = [np.zeros(shape, dtype=stored) for _ in range(config.num_layers)]
        self.lengths: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.max_len = max_len
        # Positions that may hold something: a pass that failed wrote past the length.
        self._written: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots not taken."""
        return len(self._free)

    def take(self) -> int:
        """An empty slot.

        Raises:
            CapacityError: all are taken.
        """
        if not self._free:
            raise CapacityError("All sequence slots are taken.", remedy="Wait for a request to finish.")
        return self._free.pop()

    def reserve(self, slot: int, count: int) -> int:
        """The position from which a pass may write ``count`` rows; the length stays.

        Raises:
            CapacityError: they would not fit.
        """
        past = int(self.lengths[slot])
        if past + count > self.max_len:
            raise CapacityError(
                f"A sequence of {past + count} tokens exceeds the context of {self.max_len}.",
                remedy="Shorten the prompt, or ask for fewer tokens.",
            )
        self._written[slot] = max(self._written[slot], past + count)
        return past

    def release(self, slot: int) -> None:
        """Give a slot back; what it held is overwritten."""
        used = int(max(self.lengths[slot], self._written[slot]))
        for stored in (*self.keys, *self.values):
            stored[slot, :used] = 0
        self.lengths[slot] = self._written[slot] = 0
        self._free.append(slot)
