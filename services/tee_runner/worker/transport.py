"""How an operand reaches the worker and a result comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gelo.header import HeaderError, OffloadHeader, Status
from tee_runner.errors import WorkerError, WorkerProtocolError


@dataclass(slots=True)
class WireStats:
    """Running totals of one connection. Times in nanoseconds.

    ``worker_ns`` is what the worker says its engine took: untrusted, for profiles only.
    """

    offloads: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_ns: int = 0
    worker_ns: int = 0


def _nothing() -> None:
    """The default of :attr:`Transport.meanwhile`."""


class Transport(ABC):
    """One session with a worker. One thread uses it, one offload at a time.

    An offload is: ``operand`` gives the buffer to write into, ``exchange`` sends it and returns
    the result; or ``operand_words`` and ``exchange_words``, for weights of integers.
    """

    def __init__(self) -> None:
        self.stats = WireStats()
        # Called once per exchange, after the operand is on its way and before the wait: work
        # that is then off the critical path. Its return value is ignored.
        self.meanwhile: Callable[[], object] = _nothing
        # Whether the worker computes on processors of its own, as far as known: then much can be
        # done meanwhile without slowing it down.
        self.worker_apart = False

    @abstractmethod
    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        """The buffer for the next operand: ``(rows, d_in)`` float16, uninitialised."""

    @abstractmethod
    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.float32]:
        """Send the operand written last and wait for ``(rows, d_out)`` float32.

        The result may be memory the worker can still write: read each value once, and check
        that what was read is finite. It is valid until the next call.

        Raises:
            WorkerUnavailableError: the worker is gone or too slow.
            WorkerProtocolError: the answer is not what the protocol allows.
            WorkerError: the worker says it failed.
        """

    @abstractmethod
    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        """The buffer for the next operand of words: ``(rows, d_in)`` uint32, uninitialised.

        It may be the same memory as :meth:`operand`'s.
        """

    @abstractmethod
    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.uint32]:
        """Send the operand of words written last and wait for ``(rows, d_out)`` uint32.

        The result is the product modulo 2^32 with a weight of int8 or int16, if the worker is
        honest. As with :meth:`exchange` it may be memory the worker can still write: read each
        word once. It is valid until the next call.

        Raises:
            As :meth:`exchange`.
        """

    def answered(self) -> bool:
        """Whether the answer is there, while :attr:`meanwhile` runs: nothing should delay it then.

        Nothing of it has been checked. A transport that cannot tell says yes.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """End the session."""


def check_answer(sent: OffloadHeader, raw: bytes) -> int:
    """Check the header of an answer against the request; returns the worker's ``compute_ns``.

    Raises:
        WorkerProtocolError: it is not an answer to this request.
        WorkerError: the worker reports a failure.
    """
    try:
        answer = OffloadHeader.unpack(raw)
    except HeaderError as error:
        raise WorkerProtocolError(f"The worker's answer has no valid header: {error}.") from error
    expected = (sent.sequence, sent.weight_id, sent.rows, sent.d_in, sent.d_out, sent.kind)
    received = (answer.sequence, answer.weight_id, answer.rows, answer.d_in, answer.d_out, answer.kind)
    if received != expected:
        raise WorkerProtocolError("The worker answered another request than the one it was sent.")
    if answer.status != Status.OK:
        raise WorkerError(
            f"The worker reports {answer.status.name}.", remedy="See the worker's log for the reason."
        )
    return min(answer.compute_ns, 1 << 62)
