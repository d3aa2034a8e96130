"""Offloads inline over gRPC: any topology, one copy each way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from gelo.header import OffloadHeader, OperandKind
from gelo.v1 import worker_pb2, worker_pb2_grpc
from tee_runner.errors import WorkerError, WorkerProtocolError, WorkerUnavailableError
from tee_runner.worker.transport import Transport, check_answer

_OPERANDS: dict[OperandKind, np.dtype[Any]] = {
    OperandKind.HALF: np.dtype(np.float16),
    OperandKind.WORDS: np.dtype(np.uint32),
}
_RESULTS: dict[OperandKind, np.dtype[Any]] = {
    OperandKind.HALF: np.dtype(np.float32),
    OperandKind.WORDS: np.dtype(np.uint32),
}


class InlineTransport(Transport):
    """A session whose operands and results ride in the messages of one gRPC stream.

    Rows are independent of each other in a product, so operands that would exceed
    ``max_message`` bytes either way are sent in row chunks.
    """

    def __init__(
        self, stub: worker_pb2_grpc.WorkerStub, *, session_id: bytes, max_message: int, timeout: float
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._max_message = max_message
        self._sequence = 0
        self._operand = np.empty(0, dtype=np.uint8)
        self._result = np.empty(0, dtype=np.uint8)
        self._written: NDArray[Any] = np.empty((0, 0), dtype=np.float16)
        self._requests: queue.SimpleQueue[worker_pb2.ComputeRequest | None] = queue.SimpleQueue()
        self._requests.put(worker_pb2.ComputeRequest(session_id=session_id))
        self._replies: queue.SimpleQueue[worker_pb2.ComputeReply | grpc.RpcError] = queue.SimpleQueue()
        self._call: Any = stub.Compute(iter(self._requests.get, None))
        self._pump = _Pump(self._call, self._replies)

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        """See :meth:`Transport.operand`."""
        return self._next_operand(OperandKind.HALF, rows, d_in)

    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.operand_words`."""
        return self._next_operand(OperandKind.WORDS, rows, d_in)

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.float32]:
        """See :meth:`Transport.exchange`."""
        return self._exchange_rows(OperandKind.HALF, weight_id, rows, d_in, d_out)

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.exchange_words`."""
        return self._exchange_rows(OperandKind.WORDS, weight_id, rows, d_in, d_out)

    def _next_operand(self, kind: OperandKind, rows: int, d_in: int) -> NDArray[Any]:
        self._operand, self._written = _matrix(self._operand, _OPERANDS[kind], rows, d_in)
        return self._written

    def _exchange_rows(
        self, kind: OperandKind, weight_id: int, rows: int, d_in: int, d_out: int
    ) -> NDArray[Any]:
        operand = self._written
        if operand.dtype != _OPERANDS[kind] or operand.shape != (rows, d_in):
            raise WorkerProtocolError("exchange() was called for another operand than the last one.")
        self._result, result = _matrix(self._result, _RESULTS[kind], rows, d_out)
        step = max(1, min(self._max_message // (d_in * kind.item_bytes), self._max_message // (d_out * 4)))
        started = time.perf_counter_ns()
        for first in range(0, rows, step):
            part = operand[first : first + step]
            self._exchange(kind, weight_id, part, result[first : first + step])
        self.stats.exchange_ns += time.perf_counter_ns() - started
        return result

    def _exchange(self, kind: OperandKind, weight_id: int, operand: NDArray[Any], out: NDArray[Any]) -> None:
        self._sequence += 1
        header = OffloadHeader(
            sequence=self._sequence, weight_id=weight_id, rows=len(operand),
            d_in=operand.shape[1], d_out=out.shape[1], kind=kind,
        )  # fmt: skip
        self._requests.put(worker_pb2.ComputeRequest(header=header.pack(), operand=operand.tobytes()))
        self._pump.take_one()
        self.meanwhile()
        try:
            reply = self._replies.get(timeout=self._timeout)
        except queue.Empty:
            raise WorkerUnavailableError(f"The worker did not answer within {self._timeout:g} s.") from None
        if isinstance(reply, grpc.RpcError):
            self._replies.put(reply)  # a later exchange fails at once, too
            raise worker_error(reply)
        self.stats.worker_ns += check_answer(header, reply.header)
        if len(reply.result) != header.result_bytes:
            raise WorkerProtocolError("The worker's result has the wrong length.")
        out[...] = np.frombuffer(reply.result, dtype=out.dtype).reshape(out.shape)
        self.stats.offloads += 1
        self.stats.bytes_sent += header.operand_bytes
        self.stats.bytes_received += header.result_bytes

    def answered(self) -> bool:
        """See :meth:`Transport.answered`."""
        return not self._replies.empty()

    def close(self) -> None:
        """Ends the stream and with it the session."""
        self._requests.put(None)
        self._call.cancel()
        self._pump.take_one()


def _matrix(
    buffer: NDArray[np.uint8], dtype: np.dtype[Any], rows: int, columns: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """``buffer``, or a larger one, and its beginning as ``(rows, columns)``."""
    size = rows * columns * dtype.itemsize
    if buffer.size < size:
        buffer = np.empty(size, dtype=np.uint8)
    return buffer, buffer[:size].view(dtype).reshape(rows, columns)


class _Pump:
    """Moves replies from the call into a queue, so that waiting for one can time out.

    One reply per request: what a worker sends unasked stays in the network's bounded buffers.
    """

    def __init__(
        self,
        call: Iterable[worker_pb2.ComputeReply],
        replies: queue.SimpleQueue[worker_pb2.ComputeReply | grpc.RpcError],
    ) -> None:
        self._call, self._replies = call, replies
        self._wanted = threading.Semaphore(0)
        threading.Thread(target=self._run, name="gelo-replies", daemon=True).start()

    def take_one(self) -> None:
        """Allow one more reply, or the end of the stream, into the queue."""
        self._wanted.release()

    def _run(self) -> None:
        try:
            self._wanted.acquire()
            for reply in self._call:
                self._replies.put(reply)
                self._wanted.acquire()
            self._replies.put(_StreamEnded())
        except grpc.RpcError as error:
            self._replies.put(error)


class _StreamEnded(grpc.RpcError):
    """The worker ended the stream without being asked."""


def worker_error(error: grpc.RpcError) -> WorkerError:
    """A gRPC failure as one of ours. The worker's own words are untrusted and bounded."""
    # grpc's errors of a call are also its Call, which its type stubs cannot express.
    call: Any = error
    code = call.code() if hasattr(error, "code") else None
    details = str(call.details() or "")[:200] if hasattr(error, "details") else "the stream ended"
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        None,
        grpc.StatusCode.CANCELLED,
    ):
        return WorkerUnavailableError(
            f"The worker cannot be reached ({code.name if code else 'closed'}).",
            remedy="Start it with `gelo worker`, or check its address.",
        )
    return WorkerError(f"The worker refused ({code.name}): {details!r}.")
