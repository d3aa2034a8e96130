"""What every matrix engine offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


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
    """An engine's handle to a resident weight. ``state`` is the engine's own."""

    d_in: int
    d_out: int
    state: object


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says why."""


class Engine(ABC):
    """Matrix products with f16 operands and f32 accumulation.

    Not thread-safe: one thread calls it at a time.
    """

    info: EngineInfo

    @abstractmethod
    def load(self, weight: NDArray[np.float16]) -> LoadedWeight:
        """Make ``weight`` ``(d_out, d_in)`` float16 C-contiguous resident, in the engine's own layout.

        The array need not outlive the call.

        Raises:
            EngineError: it does not fit.
        """

    @abstractmethod
    def unload(self, weight: LoadedWeight) -> None:
        """Free what :meth:`load` made."""

    @abstractmethod
    def matmul(self, weight: LoadedWeight, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
        """``out[...] = operand @ weight.T``: ``(m, d_in)`` f16 to ``(m, d_out)`` f32, m >= 1."""

    def close(self) -> None:  # noqa: B027 - an engine without resources has nothing to free
        """Free everything."""
