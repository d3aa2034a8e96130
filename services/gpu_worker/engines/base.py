"""What every matrix engine offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.slab import Doorbell, Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine runs on, for the log and the info RPC."""

    name: str
    adapter: str
    backend: str
    hardware_gpu: bool
    features: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeight:
    """An engine's handle to a resident weight of ``format``. ``state`` is the engine's own."""

    d_in: int
    d_out: int
    format: WeightFormat
    state: object

    @property
    def size(self) -> int:
        """Of its values as uploaded, in bytes."""
        return self.d_in * self.d_out * self.format.item_bytes


AnyWeight = NDArray[np.float16] | NDArray[np.int8] | NDArray[np.int16]


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says why."""


class Left(IntEnum):
    """Why an :class:`OffloadLoop` came back. All but ``REQUEST`` have nothing left to answer."""

    IDLE = 0  # no request for as many yields as were asked for
    WANTED = 1  # somebody else waits for the engine
    ASLEEP = 2  # the runner sleeps: it must be woken
    REQUEST = 3  # the request received last is not for the loop


class OffloadLoop(Protocol):
    """Answers the offloads of one session for as long as it can."""

    def serve(self, wanted: int, spins: int) -> Left:
        """Wait for requests, ``spins`` yields for each, and answer them.

        ``wanted`` is the address of an int64 that is not 0 while somebody else waits for the engine.
        """


class Engine(ABC):
    """Matrix products: f16 factors with f32 accumulation, or integers modulo 2^32.

    Not thread-safe: one thread calls it at a time.
    """

    info: EngineInfo

    @abstractmethod
    def load(self, weight: AnyWeight) -> LoadedWeight:
        """Make ``weight`` ``(d_out, d_in)`` C-contiguous resident, in the engine's own layout.

        It is float16, int8 or int16. The array need not outlive the call.

        Raises:
            EngineError: it is no such matrix, an int16 value exceeds 32639, or it does not fit.
        """

    @abstractmethod
    def unload(self, weight: LoadedWeight) -> None:
        """Free what :meth:`load` made."""

    @abstractmethod
    def matmul(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        """``out[...] = operand @ weight.T``: ``(m, d_in)`` to ``(m, d_out)``, m >= 1.

        With a weight of float16, from float16 to float32; with one of int8 or int16, from uint32 to
        uint32, modulo 2^32. The operand may be memory that another process writes.

        Raises:
            EngineError: shapes or types do not fit, or the device fails.
        """

    def loop(self, weights: Sequence[LoadedWeight], slab: Slab, doorbell: Doorbell) -> OffloadLoop | None:
        """Something that answers a slab's offloads faster than one :meth:`matmul` at a time, if there is."""
        return None

    def close(self) -> None:  # noqa: B027 - an engine without resources has nothing to free
        """Free everything."""
