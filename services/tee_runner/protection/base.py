"""The interface every protection scheme implements."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import WorkerProtocolError
from tee_runner.memory import LINE, on_lines
from tee_runner.profile import Profile
from tee_runner.protection.integrity import Integrity
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.worker.transport import Transport

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Result = TypeVar("Result")
_LINE_FLOATS = LINE // 4
# Called with what is being done, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]

# Largest magnitude an operand may reach in f16, a factor 8 below its maximum (65504): room
# for the tail of the bound's estimate.
OPERAND_LIMIT = 8192.0
HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight the worker holds under ``weight_id``; maps ``(n, d_in)`` to ``(n, d_out)``."""

    weight_id: int
    name: str
    d_in: int
    d_out: int
    # The runner's own copy, ``(d_out, d_in)`` float16, and its spectral norm (0: not known yet).
    # What the integrity check is made of.
    load: Callable[[], NDArray[np.float16]] | None = None
    spectral_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOptions:
    """How often masks are drawn, for schemes that have them.

    ``shared_decode``: one A over all sequences that decode in a step, instead of one each.
    ``per_offload``: a fresh A for every offload, instead of one per forward pass.
    """

    shared_decode: bool = False
    per_offload: bool = False


def _unseen(what: str, done: int, total: int) -> None:
    """The default of :attr:`Protection.progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOptions:
    """The options of all schemes; each takes what concerns it."""

    masks: MaskOptions = field(default_factory=MaskOptions)
    lpn: LpnOptions = field(default_factory=LpnOptions)


class ForwardSession(ABC):
    """The secrets of one forward pass. Use as a context manager: leaving wipes them."""

    @abstractmethod
    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        """``out = rows · weightᵀ``, computed by the worker on protected operands.

        ``rows`` ``(n, d_in)`` and ``out`` ``(n, d_out)`` are float32; ``counts`` gives the rows
        of each sequence of the pass in order, 0 for one that has none here (their sum is n), so
        that a scheme can treat sequences apart.

        Raises:
            WorkerError: the worker failed, or its answer cannot be used.
        """

    def wipe(self) -> None:  # noqa: B027 - a scheme without secrets has nothing to wipe
        """Overwrite the pass's secrets."""

    def __enter__(self) -> ForwardSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wipe()


class Protection(ABC):
    """A scheme bound to one worker session."""

    name: ClassVar[str]
    # One sentence for people who start the service; empty when there is nothing to warn of.
    warning: ClassVar[str] = ""
    # Bytes of an operand's element on the wire.
    operand_item_bytes: ClassVar[int] = HALF_BYTES
    # Whether results are sums of rounded products, which are checked up to a tolerance.
    rounded_results: ClassVar[bool] = True
    # Rows of an offload that provisioning needs, which the buffers must hold too.
    provision_rows: ClassVar[int] = 0

    def __init__(self, transport: Transport, *, masks: MaskOptions | None = None) -> None:
        self.transport = transport
        self.masks = masks or MaskOptions()
        self.profile = Profile()
        # Told how far provisioning is.
        self.progress: Progress = _unseen
        # Elements of the weight of the offload in progress.
        self.product_elements = 0
        # The check of results, if there is one.
        self.integrity: Integrity | None = None

    @classmethod
    def open(cls, transport: Transport, options: SchemeOptions, store: object = None) -> Protection:
        """A session of this scheme; ``store`` as from :meth:`new_store`, None for a fresh one."""
        return cls(transport, masks=options.masks)

    @classmethod
    def new_store(cls) -> object:
        """Where sessions of one model that follow each other keep public data; None if they have none."""
        return None

    @classmethod
    def wire_weight(cls, weight: NDArray[np.float16], options: SchemeOptions) -> NDArray[Any]:
        """What the worker must hold for ``weight`` ``(d_out, d_in)``: float16, int8 or int16."""
        return weight

    @classmethod
    def held_bytes(cls, shapes: Sequence[tuple[int, int]], options: SchemeOptions) -> int:
        """Memory that the scheme keeps for weights of these ``(d_in, d_out)``, checks not counted."""
        return 0

    @classmethod
    def parameters(cls) -> dict[str, int | float | str]:
        """What a client may want to know; rides in the attestation statement."""
        return {}

    @classmethod
    def parameters_for(cls, widths: Collection[int], options: SchemeOptions) -> dict[str, int | float | str]:
        """:meth:`parameters` of this scheme for a model whose weights have these input widths.

        Raises:
            GeloError: the scheme cannot protect rows of one of them as ``options`` ask.
        """
        return cls.parameters()

    @classmethod
    @abstractmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """Rows of the operand for data rows ``counts``: what the buffers must hold."""

    def provision(self, weights: Sequence[Linear], *, probes: int = 0) -> None:
        """Once per worker session, before the first pass: what the scheme keeps per weight.

        ``probes`` > 0 has every result checked against projections drawn here, 0 none.

        Raises:
            ValueError: a weight has no ``load`` to make a projection from.
            WorkerError: the worker failed at what the scheme needs of it.
        """
        if not probes:
            return
        integrity = Integrity(probes)
        for weight in weights:
            if weight.load is None:
                raise ValueError(f"{weight.name} cannot be checked without its values")
            integrity.add(weight.weight_id, weight.load, weight.spectral_norm)
        self.integrity = integrity
        others = self.transport.meanwhile

        def meanwhile() -> None:
            begin = time.perf_counter_ns()
            integrity.expect()
            self.profile.add("check", time.perf_counter_ns() - begin)
            others()

        self.transport.meanwhile = meanwhile

    def idle(self) -> bool:
        """A bounded piece of work to do ahead while no request runs; False when none is left."""
        return False

    @abstractmethod
    def forward_session(self) -> ForwardSession:
        """Fresh secrets for one forward pass."""

    def close(self) -> None:
        """End the worker session and overwrite what was kept for it."""
        self.transport.close()
        if self.integrity is not None:
            self.integrity.wipe()

    def operand(self, weight: Linear, rows: int) -> NDArray[np.uint16]:
        """Where a scheme that sends float16 writes its operand: ``(rows, d_in)``, as bits.

        The runner's own memory if results are checked: the worker could change what the check
        reads in memory that it shares.
        """
        if self.integrity is not None:
            return self.integrity.operand(rows, weight.d_in)
        return self.transport.operand(rows, weight.d_in).view(np.uint16)

    def exchange(self, weight: Linear, rows: int) -> Float32:
        """Send the operand written last; the result ``(rows, d_out)``, valid until the next call.

        Checked and in the runner's own memory, unless the session has no checks; then the
        limits of :meth:`Transport.exchange` hold.

        Raises:
            WorkerError: the worker failed, or the result is wrong.
        """
        integrity = self.integrity
        if integrity is None:
            return self.profiled(self.transport.exchange, weight, rows)
        private = integrity.begin(weight.weight_id, rows)
        np.copyto(self.transport.operand(rows, weight.d_in), private)
        result = self.profiled(self.transport.exchange, weight, rows)
        begin = time.perf_counter_ns()
        verified = integrity.verified(weight.name, result)
        self.profile.add("check", time.perf_counter_ns() - begin)
        return verified

    def profiled(self, exchange: Callable[[int, int, int, int], Result], weight: Linear, rows: int) -> Result:
        """One exchange of the transport's, its wait split into what the worker computed and the wire.

        Neither has what was done meanwhile, which is in other buckets.
        """
        stats, profile = self.transport.stats, self.profile
        self.product_elements = weight.d_in * weight.d_out
        exchanged, computed, busy = stats.exchange_ns, stats.worker_ns, profile.meanwhile()
        result = exchange(weight.weight_id, rows, weight.d_in, weight.d_out)
        busy = profile.meanwhile() - busy
        waited = max(0, stats.exchange_ns - exchanged - busy)
        worker = min(waited, max(0, stats.worker_ns - computed - busy))
        profile.add("worker compute", worker)
        profile.add("wire", waited - worker)
        return result


def require_finite(bad: bool, weight: Linear) -> None:
    """Refuse a result that had a NaN or an infinity.

    Raises:
        WorkerProtocolError: ``bad`` is true.
    """
    if bad:
        raise WorkerProtocolError(
            f"The worker's result for {weight.name} is not finite.",
            remedy="Nothing of it was used. The worker is faulty or lying.",
        )


class Scratch:
    """A float32 buffer that grows and is reused, private to one thread."""

    __slots__ = ("_buffer", "_used")

    def __init__(self) -> None:
        self._buffer: Float32 = np.empty(0, dtype=np.float32)
        # Floats handed out since the last wipe.
        self._used = 0

    def take(self, size: int) -> Float32:
        """``size`` floats, uninitialised; valid until the next call."""
        if self._buffer.size < size:
            self.wipe()
            self._buffer = on_lines(size, np.float32)
        self._used = max(self._used, size)
        return self._buffer[:size]

    def tiles(self, size: int) -> Float32:
        """``size`` floats at least for each thread of a kernel, ``(threads, floats)``, rows on cache lines.

        As :meth:`take`.
        """
        floats = -(-size // _LINE_FLOATS) * _LINE_FLOATS
        threads = numba.get_num_threads()
        return self.take(threads * floats).reshape(threads, floats)

    def wipe(self) -> None:
        """Overwrite what was handed out since the last time."""
        self._buffer[: self._used] = 0.0
        self._used = 0
