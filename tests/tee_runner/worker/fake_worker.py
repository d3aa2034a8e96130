"""A worker that speaks the protocol, computes correctly, and misbehaves where it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import grpc
import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.header import OffloadHeader, OperandKind, Status
from gelo.slab import ATTACH_BYTES, AttachMessage, Doorbell, DoorbellClosedError, Slab
from gelo.v1 import worker_pb2, worker_pb2_grpc

AnswerFault = Literal[
    "none", "later sequence", "earlier sequence", "fewer rows", "more rows", "other weight", "other d_in",
    "other d_out", "other kind", "bad request", "engine failed", "unknown status", "garbage", "zeros",
    "wrong magic", "wrong version", "unknown kind", "NaN", "+inf", "-inf", "one NaN", "huge", "silent",
    "hang up", "short header", "long header", "no header", "short result", "long result", "no result",
    "abort", "flood",
]  # fmt: skip
AttachFault = Literal["none", "close", "say no", "never answer"]

_ALTERED: dict[str, dict[str, int]] = {
    "later sequence": {"sequence": 1},
    "earlier sequence": {"sequence": -1},
    "fewer rows": {"rows": -1},
    "more rows": {"rows": 1},
    "other weight": {"weight_id": 1},
    "other d_in": {"d_in": 1},
    "other d_out": {"d_out": -1},
}
_PATCHED: dict[str, tuple[int, bytes]] = {
    "unknown status": (6, b"\x77\x77"),
    "wrong magic": (0, b"OLEG"),
    "wrong version": (4, b"\2\0"),
    "unknown kind": (63, b"\x80"),
}
_OPERANDS = {OperandKind.HALF: np.float16, OperandKind.WORDS: np.uint32}
_VALUES = {"NaN": np.nan, "+inf": np.inf, "-inf": -np.inf, "huge": 3e38}


def _answer(
    fault: AnswerFault, header: OffloadHeader, operand: NDArray[Any], weight: NDArray[Any]
) -> tuple[bytes, NDArray[Any]]:
    wide = np.uint32 if header.kind == OperandKind.WORDS else np.float32
    result = (operand.astype(wide) @ weight.astype(wide).T).astype(wide)
    raw = header._replace(compute_ns=1).pack()
    if fault == "other kind":
        raw = header._replace(kind=OperandKind(1 - header.kind)).pack()
    elif fault in _ALTERED:
        changes = {name: getattr(header, name) + step for name, step in _ALTERED[fault].items()}
        raw = OffloadHeader(**{**_fields(header), **changes}).pack()
    elif fault in _PATCHED:
        offset, patch = _PATCHED[fault]
        raw = raw[:offset] + patch + raw[offset + len(patch) :]
    elif fault in _VALUES:
        result[...] = _VALUES[fault]
    elif fault == "one NaN":
        result[-1, -1] = np.nan
    elif fault in ("bad request", "engine failed"):
        status = Status.BAD_REQUEST if fault == "bad request" else Status.ENGINE_FAILED
        raw = header._replace(status=status).pack()
    elif fault == "garbage":
        raw = hashlib.sha512(raw).digest()
    elif fault == "zeros":
        raw = bytes(64)
    elif fault == "short header":
        raw = raw[:-1]
    elif fault == "long header":
        raw += b"\0"
    elif fault == "no header":
        raw = b""
    return raw, result


def _fields(header: OffloadHeader) -> dict[str, int]:
    names = ("sequence", "weight_id", "rows", "d_in", "d_out", "kind")
    return {name: getattr(header, name) for name in names}


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves until :meth:`close`. The faults can be changed at any time."""

    fault: AnswerFault = "none"
    good_answers: int = 0  # offloads of a session answered correctly before the fault
    attach_fault: AttachFault = "none"
    doorbell_path: str | None = None  # offered instead of the true one
    refuse: tuple[str, ...] = ()  # RPCs that are aborted
    replies_sent: int = 0
    address: str = ""
    _weights: dict[bytes, NDArray[Any]] = field(default_factory=dict)
    _sessions: dict[bytes, list[bytes]] = field(default_factory=dict)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fake-worker-"))
        self._path = self._directory / "doorbell"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=16),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._server.stop(grace=None).wait()
        self._path.unlink()
        self._directory.rmdir()

    # --- the service

    def _gate(self, name: str, context: grpc.ServicerContext) -> None:
        if name in self.refuse:
            self._abort(context)

    @staticmethod
    def _abort(context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.INTERNAL, "lies and \x1b[31mcontrol characters\n" * 100)
        raise AssertionError("abort returned")

    def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetInfoReply:
        """This kernel's boot id, and names too long for any log."""
        self._gate("GetInfo", context)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return worker_pb2.GetInfoReply(engine="e" * 9999, adapter="a" * 9999, backend="b", boot_id=boot_id)

    def MissingWeights(
        self, request: worker_pb2.MissingWeightsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.MissingWeightsReply:
        """All that are missing, and one that nobody asked for."""
        self._gate("MissingWeights", context)
        missing = [w.sha256 for w in request.weights if w.sha256 not in self._weights]
        return worker_pb2.MissingWeightsReply(sha256=[*missing, bytes(32), b"short"])

    def UploadWeight(
        self, request_iterator: Iterator[worker_pb2.UploadWeightRequest], context: grpc.ServicerContext
    ) -> worker_pb2.UploadWeightReply:
        """Keep the weight."""
        self._gate("UploadWeight", context)
        weight = next(request_iterator).weight
        data = b"".join(part.chunk for part in request_iterator)
        values = np.frombuffer(data, WeightFormat(weight.format).dtype)
        self._weights[weight.sha256] = values.reshape(weight.d_out, weight.d_in)
        return worker_pb2.UploadWeightReply()

    def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> worker_pb2.OpenSessionReply:
        """A session; the doorbell is offered whether wanted or not."""
        self._gate("OpenSession", context)
        session_id = os.urandom(16)
        self._sessions[session_id] = [w.sha256 for w in request.weights]
        path = str(self._path) if self.doorbell_path is None else self.doorbell_path
        return worker_pb2.OpenSessionReply(session_id=session_id, doorbell_path=path)

    def Compute(
        self, request_iterator: Iterator[worker_pb2.ComputeRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.ComputeReply]:
        """Offloads inline."""
        digests = self._sessions[next(request_iterator).session_id]
        for answered, request in enumerate(request_iterator):
            fault: AnswerFault = self.fault if answered >= self.good_answers else "none"
            if fault == "silent":
                self._closing.wait()
                return
            if fault == "hang up":
                return
            if fault == "abort":
                self._abort(context)
            header = OffloadHeader.unpack(request.header)
            operand = np.frombuffer(request.operand, _OPERANDS[header.kind])
            operand = operand.reshape(header.rows, header.d_in)
            raw, result = _answer(fault, header, operand, self._weights[digests[header.weight_id]])
            payload = result.tobytes()
            if fault in ("short result", "no result"):
                payload = payload[:-4] if fault == "short result" else b""
            elif fault == "long result":
                payload += bytes(4)
            reply = worker_pb2.ComputeReply(header=raw, result=payload)
            while fault == "flood" and context.is_active():
                self.replies_sent += 1
                yield reply
            yield reply

    # --- the doorbell

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            data, descriptors, _, _ = socket.recv_fds(peer, ATTACH_BYTES, 1)
            message = AttachMessage.unpack(data)
            slab = Slab.attach(descriptors[0], message.sizes)
            os.close(descriptors[0])
            if self.attach_fault == "never answer":
                self._closing.wait()
            if self.attach_fault != "none":
                peer.send(b"no" if self.attach_fault == "say no" else b"")
                return
            with contextlib.suppress(OSError):
                peer.send(b"ok")
            self._answer_slab(peer, slab, self._sessions[message.session_id])

    def _answer_slab(self, peer: socket.socket, slab: Slab, digests: list[bytes]) -> None:
        doorbell = Doorbell(slab, peer, runner=False, spins=100)
        answered = 0
        while True:
            try:
                header = OffloadHeader.unpack(doorbell.wait(None))
            except DoorbellClosedError:
                return
            fault: AnswerFault = self.fault if answered >= self.good_answers else "none"
            if fault == "silent":
                self._closing.wait()
            if fault in ("silent", "hang up"):
                return
            words = header.kind == OperandKind.WORDS
            operand = (slab.operand_words if words else slab.operand)(header.rows, header.d_in)
            raw, result = _answer(fault, header, operand, self._weights[digests[header.weight_id]])
            (slab.result_words if words else slab.result)(header.rows, header.d_out)[...] = result
            answered += 1
            doorbell.ring(answered, raw)
