"""Calls to the worker's service, and a doorbell attached to it, for its tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gelo.header import OffloadHeader
from gelo.slab import AttachMessage, Doorbell, Slab, SlabSizes
from gelo.v1 import worker_pb2

from .conftest import HANG_GUARD_S, Service, make_weight

SIZES = SlabSizes(operand=4096, result=8192)
WEIGHT = make_weight(6, 4)


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    assert isinstance(error.value, grpc.Call)
    code: grpc.StatusCode = error.value.code()
    return code


def header(**changes: int) -> OffloadHeader:
    return OffloadHeader(**{"sequence": 1, "weight_id": 0, "rows": 2, "d_in": 4, "d_out": 6} | changes)


def operand_of(rows: int = 2, d_in: int = 4) -> NDArray[np.float16]:
    return np.arange(rows * d_in).reshape(rows, d_in).astype(np.float16)


def compute(
    service: Service, session_id: bytes, *requests: tuple[bytes, bytes]
) -> Iterator[worker_pb2.ComputeReply]:
    messages = [worker_pb2.ComputeRequest(session_id=session_id)]
    messages += [worker_pb2.ComputeRequest(header=head, operand=operand) for head, operand in requests]
    replies: Iterator[worker_pb2.ComputeReply] = service.stub.Compute(iter(messages), timeout=HANG_GUARD_S)
    return replies


def attach(
    path: str, message: bytes, descriptors: list[int], *, hang_up: bool = False
) -> tuple[socket.socket, bytes]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(HANG_GUARD_S)
    peer.connect(path)
    socket.send_fds(peer, [message], descriptors)
    return peer, b"" if hang_up else peer.recv(16)


def attached(service: Service, session: worker_pb2.OpenSessionReply) -> tuple[Slab, Doorbell, socket.socket]:
    slab, descriptor = Slab.create(SIZES)
    message = AttachMessage(session_id=session.session_id, sizes=SIZES).pack()
    peer, answer = attach(session.doorbell_path, message, [descriptor])
    os.close(descriptor)
    assert answer == b"ok"
    peer.settimeout(None)
    return slab, Doorbell(slab, peer, runner=True, spins=100), peer
