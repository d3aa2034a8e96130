"""Serves offloads through shared-memory slabs, for runners on the same host."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gelo.doorbell_kernels import WORDS
from gelo.header import HeaderError, OffloadHeader, OperandKind, Status
from gelo.slab import (
    ATTACH_BYTES,
    AttachMessage,
    Doorbell,
    DoorbellClosedError,
    Slab,
    SlabError,
)
from gpu_worker.engines.base import Left
from gpu_worker.session import Session, Sessions, fits

log = logging.getLogger(__name__)

# Yields before this side sleeps between two offloads of one runner: about a millisecond,
# more than the runner's own work between two offloads, less than a person notices.
_SPINS = 3000
_ATTACH_TIMEOUT_S = 5.0


class DoorbellServer:
    """A SOCK_SEQPACKET listener in a private directory, one thread per attached session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._served: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._directory = Path(tempfile.mkdtemp(prefix="gelo-worker-"))
        self.path = self._directory / "doorbell"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._accept, name="gelo-doorbell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the attached sessions and remove the socket."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        # A busy runner rings without touching the socket; the flag reaches its thread, once it has
        # come out of its loop.
        self._closing = True
        self._sessions.interrupt()
        with self._lock:
            served = dict(self._served)
            for peer in served:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        for thread in served.values():
            thread.join()
        with contextlib.suppress(OSError):
            self.path.unlink()
            self._directory.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), name="gelo-session", daemon=True)
            with self._lock:
                self._served[peer] = thread
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            session, slab = self._attach(peer)
            try:
                peer.send(b"ok")
                self._answer(session, slab, Doorbell(slab, peer, runner=False, spins=_SPINS))
            except (DoorbellClosedError, OSError):
                log.info("doorbell: the runner left")
            finally:
                self._sessions.close(session.session_id)
        except (SlabError, OSError) as error:
            log.warning("doorbell: refused a runner: %s", error)
        finally:
            with self._lock:
                del self._served[peer]
                peer.close()

    def _attach(self, peer: socket.socket) -> tuple[Session, Slab]:
        peer.settimeout(_ATTACH_TIMEOUT_S)
        data, descriptors, _, _ = socket.recv_fds(peer, ATTACH_BYTES + 1, 1)
        try:
            message = AttachMessage.unpack(data)
            if len(descriptors) != 1:
                raise SlabError("an attach message carries one descriptor")
            slab = Slab.attach(descriptors[0], message.sizes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        session = self._sessions.claim(message.session_id)
        if session is None:
            raise SlabError("unknown session, or one that has its doorbell already")
        peer.settimeout(None)
        return session, slab

    def _answer(self, session: Session, slab: Slab, doorbell: Doorbell) -> None:
        loop = self._sessions.loop(session, slab, doorbell)
        while not self._closing:
            left = Left.IDLE if loop is None else self._sessions.run_loop(session, loop, _SPINS)
            if left == Left.WANTED:
                os.sched_yield()
            elif left == Left.ASLEEP:
                doorbell.wake()
            else:
                raw = doorbell.words[:WORDS].tobytes() if left == Left.REQUEST else doorbell.wait(None)
                try:
                    header = OffloadHeader.unpack(raw)
                except HeaderError as error:
                    log.warning("doorbell: bad header: %s", error)
                    return
                doorbell.ring(doorbell.rung + 1, self._run(session, slab, header).pack())

    def _run(self, session: Session, slab: Slab, header: OffloadHeader) -> OffloadHeader:
        try:
            if not fits(session, header):
                raise SlabError("unknown weight, or not its shape or kind")
            operand: NDArray[Any]
            result: NDArray[Any]
            if header.kind == OperandKind.WORDS:
                operand = slab.operand_words(header.rows, header.d_in)
                result = slab.result_words(header.rows, header.d_out)
            else:
                operand = slab.operand(header.rows, header.d_in)
                result = slab.result(header.rows, header.d_out)
        except SlabError as error:
            log.warning("doorbell: bad request: %s", error)
            return header._replace(status=Status.BAD_REQUEST)
        return self._sessions.execute(session, header, operand, result)
