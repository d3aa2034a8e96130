"""The real worker, which also writes down every byte it receives.

python -m tests.e2e.spy_worker RECORDING ADDRESS
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import grpc
from numpy.typing import NDArray

from gelo.header import OffloadHeader, Status
from gelo.slab import CONTROL_BYTES, Doorbell, Slab
from gelo.v1 import worker_pb2
from gpu_worker import doorbell as doorbell_module
from gpu_worker import server as server_module
from gpu_worker.engines import create_engine
from gpu_worker.session import Session, Sessions
from tests.e2e.recording import write_record


class Recorder:
    """Serialises records of several threads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, kind: str, payload: bytes, **about: object) -> None:
        """See :func:`write_record`."""
        with self._lock:
            write_record(self._file, kind, payload, **about)


recorder: Recorder


class SpySessions(Sessions):
    """Records operands, and the results of the last weight (the LM head), with the weight's digest."""

    def loop(self, session: Session, slab: Slab, doorbell: Doorbell) -> None:
        """Every offload comes by :meth:`execute`."""

    def execute(
        self,
        session: Session,
        header: OffloadHeader,
        operand: NDArray[Any],
        result: NDArray[Any],
    ) -> OffloadHeader:
        """See :meth:`Sessions.execute`."""
        weight = session.keys[header.weight_id][:32].hex()
        about = {"weight": weight, "rows": header.rows}
        recorder.write("operand", operand.tobytes(), dtype=operand.dtype.str, **about)
        answer = super().execute(session, header, operand, result)
        if answer.status == Status.OK and header.weight_id == len(session.keys) - 1:
            recorder.write("result", result.tobytes(), dtype=result.dtype.str, **about)
        return answer


class SpyDoorbell(doorbell_module.DoorbellServer):
    """Records the control page at each request, and the whole slab when its session ends."""

    def _run(self, session: Session, slab: Slab, header: OffloadHeader) -> OffloadHeader:
        recorder.write("received", slab.memory[:CONTROL_BYTES].tobytes(), source="control page")
        return super()._run(session, slab, header)

    def _answer(self, session: Session, slab: Slab, doorbell: Doorbell) -> None:
        try:
            super()._answer(session, slab, doorbell)
        finally:
            recorder.write("received", slab.memory.tobytes(), source="slab")


class Interceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Records the bytes of every message and its metadata, before they are parsed.

    The chunks of an upload are left out: the worker accepts them only if they have the announced
    SHA-256, and the test checks that this is the digest of a public weight. Operands inline in a
    message are recorded again as operands.
    """

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Wrap the handler's parser."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        metadata = repr(list(handler_call_details.invocation_metadata)).encode()
        recorder.write("received", metadata, source=f"metadata of {method}")
        parse = handler.request_deserializer

        def recording_parse(data: bytes) -> Any:
            message = parse(data)
            if (
                not isinstance(message, worker_pb2.UploadWeightRequest)
                or message.WhichOneof("part") == "weight"
            ):
                recorder.write("received", data, source=f"message of {method}")
            if isinstance(message, worker_pb2.UploadWeightRequest) and message.WhichOneof("part") == "weight":
                recorder.write("upload", b"", weight=message.weight.sha256.hex())
            return message

        return handler._replace(request_deserializer=recording_parse)


def main() -> None:
    """See the module."""
    global recorder
    logging.basicConfig(level="INFO")
    with open(sys.argv[1], "ab") as file:
        recorder = Recorder(file)
        server_module.Sessions = SpySessions  # type: ignore[misc]
        server_module.DoorbellServer = SpyDoorbell  # type: ignore[misc]
        grpc.server = functools.partial(grpc.server, interceptors=[Interceptor()])
        settings = server_module.WorkerSettings(address=sys.argv[2])
        server_module.serve(create_engine("cpu"), settings)


if __name__ == "__main__":
    main()
