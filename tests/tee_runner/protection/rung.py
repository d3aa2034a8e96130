"""A worker on a thread behind a real slab and doorbell, honest or not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gelo.header import OffloadHeader
from gelo.slab import Doorbell, DoorbellClosedError, Slab, SlabSizes
from tee_runner.worker.slab_transport import SlabTransport
from tee_runner.worker.transport import Transport

Float32 = NDArray[np.float32]


class RungTransport(SlabTransport):
    """Products in float64, rounded once to float32.

    ``tamper`` may change a result, ``forge`` the header of an answer: None is no answer at all, and no
    bytes are leaving. ``delay`` is how long an answer takes, ``timeout`` how long the runner waits.
    """

    def __init__(
        self, weights: Sequence[NDArray[np.floating]], *, spins: int = 2000, timeout: float = 20.0
    ) -> None:  # fmt: skip
        Transport.__init__(self)
        self.weights = [weight.astype(np.float64) for weight in weights]
        self.operands: list[NDArray[np.float16]] = []
        self.tamper: Callable[[Float32], None] | None = None
        self.forge: Callable[[OffloadHeader], bytes | None] = OffloadHeader.pack
        self.delay = 0.0
        self._timeout = timeout
        sizes = SlabSizes(operand=1 << 16, result=1 << 18)
        self._slab, descriptor = Slab.create(sizes)
        others = Slab.attach(descriptor, sizes)
        os.close(descriptor)
        self._peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._doorbell = Doorbell(self._slab, self._peer, runner=True, spins=spins)
        self._thread = threading.Thread(target=self._serve, args=(others, theirs), daemon=True)
        self._thread.start()

    def _serve(self, slab: Slab, peer: socket.socket) -> None:
        bell = Doorbell(slab, peer, runner=False, spins=50)
        with peer, contextlib.suppress(DoorbellClosedError):
            while True:
                header = OffloadHeader.unpack(bell.wait(None))
                operand = slab.operand(header.rows, header.d_in).copy()
                self.operands.append(operand)
                weight = self.weights[header.weight_id]
                result = (operand.astype(np.float64) @ weight.T).astype(np.float32)
                if self.tamper is not None:
                    self.tamper(result)
                slab.result(header.rows, header.d_out)[...] = result
                time.sleep(self.delay)
                answer = self.forge(header)
                if answer == b"":
                    return
                if answer is not None:
                    bell.ring(bell.rung + 1, answer)

    def close(self) -> None:
        self._peer.close()
        self._thread.join()
