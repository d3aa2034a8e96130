"""Connecting to a worker: what it is, its weights, a session."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.slab import SlabSizes
from gelo.v1 import worker_pb2, worker_pb2_grpc
from tee_runner.errors import WorkerUnavailableError
from tee_runner.worker.inline_transport import InlineTransport, worker_error
from tee_runner.worker.slab_transport import SlabTransport
from tee_runner.worker.transport import Transport

log = logging.getLogger(__name__)

TransportName = Literal["auto", "slab", "grpc"]
Progress = Callable[[str, int, int], None]
_CHUNK_BYTES = 1 << 20
_CONTROL_TIMEOUT_S = 30.0
_MAX_MESSAGE_BYTES = 64 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWeight:
    """A weight the worker must hold: ``load`` gives the ``(d_out, d_in)`` array to upload.

    Its dtype is ``format``'s: float16, int8 or int16. Weights of integers take operands of words.
    """

    name: str
    d_in: int
    d_out: int
    sha256: bytes
    load: Callable[[], NDArray[Any]]
    format: WeightFormat = WeightFormat.FLOAT16

    @property
    def size(self) -> int:
        """Of its values, in bytes."""
        return self.d_in * self.d_out * self.format.item_bytes

    def reference(self) -> worker_pb2.WeightRef:
        """As the protocol names it."""
        # The stubs have a NewType of int for the enumeration.
        number: Any = int(self.format)
        return worker_pb2.WeightRef(
            name=self.name, sha256=self.sha256, d_in=self.d_in, d_out=self.d_out, format=number
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What the worker says of itself: untrusted. It goes to logs, and may decide what is faster."""

    engine: str
    adapter: str
    backend: str
    hardware_gpu: bool
    version: str
    boot_id: str

    @property
    def on_this_host(self) -> bool:
        """Whether the worker runs under this kernel, as it says."""
        return _BOOT_ID.exists() and self.boot_id == _BOOT_ID.read_text().strip()


def weight_digest(weight: NDArray[Any]) -> bytes:
    """SHA-256 over a weight's bytes, the name it has on the wire."""
    return hashlib.sha256(np.ascontiguousarray(weight).view(np.uint8).data).digest()


class WorkerClient:
    """A channel to one worker, and sessions over it."""

    def __init__(self, address: str, *, timeout: float = 60.0) -> None:
        self.address = address
        self._timeout = timeout
        self._channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES + (1 << 20)),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES + (1 << 20)),
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ],
        )
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    def info(self, *, wait: float = 10.0) -> WorkerInfo:
        """Ask the worker what it is, waiting up to ``wait`` seconds for it to come up.

        Raises:
            WorkerUnavailableError: it cannot be reached.
        """
        try:
            reply = self._stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=wait, wait_for_ready=wait > 1)
        except grpc.RpcError as error:
            raise worker_error(error) from error
        return WorkerInfo(
            engine=reply.engine[:64],
            adapter=reply.adapter[:128],
            backend=reply.backend[:64],
            hardware_gpu=reply.hardware_gpu,
            version=reply.version[:64],
            boot_id=reply.boot_id[:64],
        )

    def provision(self, weights: Sequence[RemoteWeight], progress: Progress | None = None) -> int:
        """Upload the weights the worker lacks; returns the bytes sent.

        Raises:
            WorkerError: unreachable, or it refuses a weight.
            ValueError: an array is not what its :class:`RemoteWeight` says.
        """
        try:
            request = worker_pb2.MissingWeightsRequest(weights=[w.reference() for w in weights])
            missing = set(self._stub.MissingWeights(request, timeout=_CONTROL_TIMEOUT_S).sha256)
            wanted = [w for w in weights if w.sha256 in missing]
            total = sum(w.size for w in wanted)
            sent = 0
            for weight in wanted:
                self._stub.UploadWeight(upload_requests(weight), timeout=self._timeout * 10)
                sent += weight.size
                if progress is not None:
                    progress("upload to the worker", sent, total)
            return sent
        except grpc.RpcError as error:
            raise worker_error(error) from error

    def open_session(
        self, weights: Sequence[RemoteWeight], sizes: SlabSizes, transport: TransportName = "auto"
    ) -> Transport:
        """A session in which weight ``i`` has id ``i``.

        ``auto`` uses a slab when the worker runs on this kernel and its socket is reachable,
        and gRPC otherwise.

        Raises:
            WorkerError: unreachable, or it refuses.
        """
        try:
            request = worker_pb2.OpenSessionRequest(
                weights=[w.reference() for w in weights], want_doorbell=transport != "grpc"
            )
            reply = self._stub.OpenSession(request, timeout=_CONTROL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise worker_error(error) from error
        if self._use_slab(reply.doorbell_path, transport):
            return SlabTransport(
                path=reply.doorbell_path, session_id=reply.session_id, sizes=sizes, timeout=self._timeout
            )
        return InlineTransport(
            self._stub, session_id=reply.session_id, max_message=_MAX_MESSAGE_BYTES, timeout=self._timeout
        )

    def _use_slab(self, path: str, transport: TransportName) -> bool:
        if transport == "grpc":
            return False
        # The path is the worker's: a NUL in it would raise ValueError below.
        named = bool(path) and "\0" not in path
        usable = named and self.info().on_this_host and os.access(path, os.W_OK)
        if not usable and transport == "slab":
            raise WorkerUnavailableError(
                "The worker offers no shared memory to this host.",
                remedy="Run both on one host, or use --transport grpc.",
            )
        return usable

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def _loaded(weight: RemoteWeight) -> NDArray[Any]:
    values = weight.load()
    if values.dtype != weight.format.dtype or values.shape != (weight.d_out, weight.d_in):
        wanted = f"{weight.format.dtype} ({weight.d_out}, {weight.d_in})"
        raise ValueError(f"{weight.name} is {values.dtype} {values.shape}, not {wanted}")
    return np.ascontiguousarray(values)


def upload_requests(weight: RemoteWeight) -> Iterator[worker_pb2.UploadWeightRequest]:
    """The messages that carry ``weight``. It is read here, so that a wrong one is noticed before any is sent.

    Raises:
        ValueError: what was read is not of the announced shape and format.
    """
    return _messages(weight, _loaded(weight))


def _messages(weight: RemoteWeight, values: NDArray[Any]) -> Iterator[worker_pb2.UploadWeightRequest]:
    yield worker_pb2.UploadWeightRequest(weight=weight.reference())
    data = values.reshape(-1).view(np.uint8).data
    for offset in range(0, len(data), _CHUNK_BYTES):
        yield worker_pb2.UploadWeightRequest(chunk=bytes(data[offset : offset + _CHUNK_BYTES]))
