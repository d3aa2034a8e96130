"""The interface every protection scheme implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import WorkerProtocolError
from tee_runner.worker.transport import Transport

Float32 = NDArray[np.float32]

# Largest magnitude an operand may reach in f16, a factor 8 below its maximum (65504): room
# for the tail of the bound's estimate.
OPERAND_LIMIT = 8192.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight the worker holds under ``weight_id``; maps ``(n, d_in)`` to ``(n, d_out)``."""

    weight_id: int
    name: str
    d_in: int
    d_out: int


class ForwardSession(ABC):
    """The secrets of one forward pass. Use as a context manager: leaving wipes them."""

    @abstractmethod
    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        """``out = rows · weightᵀ``, computed by the worker on protected operands.

        ``rows`` ``(n, d_in)`` and ``out`` ``(n, d_out)`` are float32; ``counts`` gives the rows
        of each sequence of the pass in order, 0 for one that has none here (their sum is n), so
        that a scheme can treat sequences apart.

        Raises:
            WorkerError: the worker failed, or its answer cannot be used.
        """

    def wipe(self) -> None:  # noqa: B027 - a scheme without secrets has nothing to wipe
        """Overwrite the pass's secrets."""

    def __enter__(self) -> ForwardSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wipe()


class Protection(ABC):
    """A scheme bound to one worker session."""

    name: ClassVar[str]
    # One sentence for people who start the service; empty when there is nothing to warn of.
    warning: ClassVar[str] = ""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @classmethod
    def parameters(cls) -> dict[str, int | float | str]:
        """What a client may want to know; rides in the attestation statement."""
        return {}

    @classmethod
    @abstractmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """Rows of the operand for data rows ``counts``: what the buffers must hold."""

    def provision(self, weights: Sequence[Linear]) -> None:  # noqa: B027
        """Once per worker session, before the first pass: what the scheme keeps per weight."""

    def idle(self) -> bool:
        """A bounded piece of work to do ahead while no request runs; False when none is left."""
        return False

    @abstractmethod
    def forward_session(self) -> ForwardSession:
        """Fresh secrets for one forward pass."""


def require_finite(bad: bool, weight: Linear) -> None:
    """Refuse a result that had a NaN or an infinity.

    Raises:
        WorkerProtocolError: ``bad`` is true.
    """
    if bad:
        raise WorkerProtocolError(
            f"The worker's result for {weight.name} is not finite.",
            remedy="Nothing of it was used. The worker is faulty or lying.",
        )


class Scratch:
    """A float32 buffer that grows and is reused, private to one thread."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer: Float32 = np.empty(0, dtype=np.float32)

    def take(self, size: int) -> Float32:
        """``size`` floats, uninitialised; valid until the next call."""
        if self._buffer.size < size:
            self.wipe()
            self._buffer = np.empty(size, dtype=np.float32)
        return self._buffer[:size]

    def wipe(self) -> None:
        """Overwrite what was written."""
        self._buffer.fill(0.0)
