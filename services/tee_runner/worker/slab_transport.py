"""Offloads through a shared-memory slab: no copy on the wire, a few microseconds to ring."""

from __future__ import annotations

import os
import socket
import time

import numpy as np
from numpy.typing import NDArray

from gelo.doorbell_kernels import WORDS, answered
from gelo.header import OffloadHeader, OperandKind
from gelo.slab import (
    AttachMessage,
    Doorbell,
    DoorbellClosedError,
    DoorbellTimeoutError,
    Slab,
    SlabError,
    SlabSizes,
)
from tee_runner.errors import CapacityError, WorkerUnavailableError
from tee_runner.worker.transport import Transport, check_answer

# Yields before blocking: longer than a decode-sized product, short enough that a prefill on
# a CPU worker gets this core.
_SPINS = 6000
_ATTACH_TIMEOUT_S = 5.0
# Plain integers: compiled code takes these.
_HALF, _WORDS = int(OperandKind.HALF), int(OperandKind.WORDS)


class SlabTransport(Transport):
    """A session whose operands and results live in memory both sides map."""

    def __init__(self, *, path: str, session_id: bytes, sizes: SlabSizes, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._peer.settimeout(_ATTACH_TIMEOUT_S)
            self._peer.connect(path)
            self._slab, descriptor = Slab.create(sizes)
            try:
                message = AttachMessage(session_id=session_id, sizes=sizes).pack()
                socket.send_fds(self._peer, [message], [descriptor])
            finally:
                os.close(descriptor)
            if self._peer.recv(16) != b"ok":
                self._peer.close()
                raise WorkerUnavailableError("The worker refused the shared-memory slab.")
            self._peer.settimeout(None)
        except OSError as error:
            self._peer.close()
            raise WorkerUnavailableError("The worker's doorbell cannot be reached.") from error
        self._doorbell = Doorbell(self._slab, self._peer, runner=True, spins=_SPINS)

    @property
    def doorbell(self) -> Doorbell:
        """For compiled code that rings and waits by itself."""
        return self._doorbell

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        """See :meth:`Transport.operand`."""
        try:
            return self._slab.operand(rows, d_in)
        except SlabError as error:
            raise CapacityError(f"An operand of {rows} rows does not fit the slab.") from error

    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.operand_words`."""
        try:
            return self._slab.operand_words(rows, d_in)
        except SlabError as error:
            raise CapacityError(f"An operand of {rows} rows does not fit the slab.") from error

    def result(self, rows: int, d_out: int) -> NDArray[np.float32]:
        """Where the worker writes ``(rows, d_out)`` float32."""
        try:
            return self._slab.result(rows, d_out)
        except SlabError as error:
            raise CapacityError(f"A result of {rows} rows does not fit the slab.") from error

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.float32]:
        """See :meth:`Transport.exchange`."""
        result = self.result(rows, d_out)
        self._exchange(_HALF, weight_id, rows, d_in, d_out)
        self.stats.bytes_sent += rows * d_in * 2
        return result

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.exchange_words`."""
        try:
            result = self._slab.result_words(rows, d_out)
        except SlabError as error:
            raise CapacityError(f"A result of {rows} rows does not fit the slab.") from error
        self._exchange(_WORDS, weight_id, rows, d_in, d_out)
        self.stats.bytes_sent += rows * d_in * 4
        return result

    def answered(self) -> bool:
        """See :meth:`Transport.answered`."""
        return self._doorbell.answered

    def _exchange(self, kind: int, weight_id: int, rows: int, d_in: int, d_out: int) -> None:
        request = (self._doorbell.rung + 1, weight_id, rows, d_in, d_out)
        started = time.perf_counter_ns()
        try:
            self._doorbell.ring_offload(*request, kind)
            self.meanwhile()
            words = self._doorbell.wait_words(self._timeout)
        except (DoorbellTimeoutError, DoorbellClosedError) as error:
            raise self._unavailable(error) from error
        worker_ns = answered(words, *request, kind)
        if worker_ns < 0:
            sent = OffloadHeader(*request, kind=OperandKind(kind))
            worker_ns = check_answer(sent, words[:WORDS].tobytes())
        stats = self.stats
        stats.exchange_ns += time.perf_counter_ns() - started
        stats.worker_ns += worker_ns
        stats.offloads += 1
        stats.bytes_received += rows * d_out * 4

    def wake(self) -> None:
        """Wake the worker, which sleeps.

        Raises:
            WorkerUnavailableError: it is gone.
        """
        try:
            self._doorbell.wake()
        except DoorbellClosedError as error:
            raise self._unavailable(error) from error

    def until_answered(self) -> None:
        """Block until the worker has rung.

        Raises:
            WorkerUnavailableError: it is gone or too slow.
        """
        try:
            self._doorbell.until_rung(self._timeout)
        except (DoorbellTimeoutError, DoorbellClosedError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> WorkerUnavailableError:
        if isinstance(error, DoorbellTimeoutError):
            return WorkerUnavailableError(f"The worker did not answer within {self._timeout:g} s.")
        return WorkerUnavailableError("The worker closed its doorbell.")

    def close(self) -> None:
        """Closing the socket ends the session on the other side."""
        self._peer.close()
