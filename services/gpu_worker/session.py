"""One runner's session: its weights, and the execution of one offload."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from gelo.header import OffloadHeader, Status
from gelo.slab import Doorbell, Slab
from gpu_worker.engines.base import Engine, EngineError, Left, LoadedWeight, OffloadLoop
from gpu_worker.lock import EngineLock
from gpu_worker.weights import WeightStore


@dataclass(slots=True)
class Session:
    """``weights[i]`` has weight_id i."""

    weights: list[LoadedWeight]
    keys: list[bytes]
    session_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    attached: bool = False
    opened: float = field(default_factory=time.monotonic)


# A session whose runner never attached a doorbell or a stream is forgotten after this.
_UNATTACHED_S = 60.0


class Sessions:
    """Open sessions, and the one lock that serialises the engine. Thread-safe."""

    def __init__(self, engine: Engine, store: WeightStore, lock: EngineLock, *, limit: int) -> None:
        self._engine = engine
        self._store = store
        self._lock = lock
        self._limit = limit
        self._open: dict[bytes, Session] = {}

    def open(self, keys: list[bytes]) -> Session:
        """A new session bound to the weights ``keys``.

        Raises:
            KeyError: a weight is not resident.
            RuntimeError: too many sessions are open.
        """
        with self._lock:
            for stale in list(self._open.values()):
                if not stale.attached and time.monotonic() - stale.opened > _UNATTACHED_S:
                    self.close(stale.session_id)
            if len(self._open) >= self._limit:
                raise RuntimeError(f"{self._limit} sessions are open already")
            session = Session(weights=self._store.bind(keys), keys=keys)
            self._open[session.session_id] = session
            return session

    def claim(self, session_id: bytes) -> Session | None:
        """The session, for the one doorbell or stream it may have; None if unknown or taken."""
        with self._lock:
            session = self._open.get(session_id)
            if session is None or session.attached:
                return None
            session.attached = True
            return session

    def close(self, session_id: bytes) -> None:
        """Close a session; unknown ids are ignored."""
        with self._lock:
            session = self._open.pop(session_id, None)
            if session is not None:
                self._store.release(session.keys)

    def loop(self, session: Session, slab: Slab, doorbell: Doorbell) -> OffloadLoop | None:
        """See :meth:`Engine.loop`."""
        with self._lock:
            return self._engine.loop(session.weights, slab, doorbell)

    def run_loop(self, session: Session, loop: OffloadLoop, spins: int) -> Left:
        """Give ``loop`` the engine until there is a reason to come back."""
        with self._lock:
            if session.session_id in self._open:
                return loop.serve(self._lock.wanted, spins)
        return Left.IDLE

    def interrupt(self) -> None:
        """Have a loop that runs come back."""
        with self._lock:
            pass

    def execute(
        self,
        session: Session,
        header: OffloadHeader,
        operand: NDArray[Any],
        result: NDArray[Any],
    ) -> OffloadHeader:
        """Run one offload into ``result`` and return the header to answer with.

        ``operand`` and ``result`` are of ``header``'s shape and kind, and ``header`` :func:`fits`.
        """
        weight = session.weights[header.weight_id]
        try:
            with self._lock:
                if session.session_id not in self._open:
                    # Closed meanwhile: its weights may be unloaded.
                    return header._replace(status=Status.BAD_REQUEST)
                started = time.perf_counter_ns()
                self._engine.matmul(weight, operand, result)
                return header._replace(compute_ns=time.perf_counter_ns() - started)
        except EngineError:
            return header._replace(status=Status.ENGINE_FAILED)


def fits(session: Session, header: OffloadHeader) -> bool:
    """Whether the header is a request for one of the session's weights, with its shape and its kind."""
    if header.status != Status.OK or header.weight_id >= len(session.weights):
        return False
    weight = session.weights[header.weight_id]
    held = (weight.d_in, weight.d_out, weight.format.kind)
    return held == (header.d_in, header.d_out, header.kind)
