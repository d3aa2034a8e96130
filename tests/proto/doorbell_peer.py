"""The worker's side of a doorbell in a process of its own, for test_slab.

python doorbell_peer.py MEMORY_FD SOCKET_FD OPERAND_BYTES RESULT_BYTES SPINS MODE
"""

from __future__ import annotations

import os
import socket
import sys
import time

from gelo.header import OffloadHeader
from gelo.slab import Doorbell, DoorbellClosedError, Slab, SlabSizes


def echo(slab: Slab, doorbell: Doorbell, *, limit: int | None) -> None:
    """Answer each request with twice its operand; after ``limit`` answers die without a word."""
    answers = 0
    while limit is None or answers < limit:
        header = OffloadHeader.unpack(doorbell.wait(None))
        answers += 1
        slab.result(header.rows, header.d_out)[...] = slab.operand(header.rows, header.d_in)
        slab.result(header.rows, header.d_out)[...] *= 2
        doorbell.ring(answers, header._replace(compute_ns=answers).pack())
    doorbell.wait(None)
    os._exit(9)


def main() -> None:
    """See the module."""
    memory, peer_fd, operand, result, spins = (int(text) for text in sys.argv[1:6])
    mode = sys.argv[6]
    peer = socket.socket(fileno=peer_fd)
    slab = Slab.attach(memory, SlabSizes(operand=operand, result=result))
    doorbell = Doorbell(slab, peer, runner=False, spins=spins)
    peer.send(b"up")
    try:
        if mode == "silent":
            time.sleep(60)
        elif mode == "flood":
            while True:
                peer.send(b"\1")
        else:
            echo(slab, doorbell, limit=None if mode == "echo" else int(mode))
    except (DoorbellClosedError, OSError):
        return


if __name__ == "__main__":
    main()
