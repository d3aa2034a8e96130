"""The offload of a decode step's single row through a doorbell: two compiled calls.

Between two products the interpreter finds its own memory evicted by the weights that passed through the
caches, so that each of its steps takes two to three times as long as usual. So one call scales, mixes,
copies what is sent and rings; the other computes what the answer must be, waits, and takes the row back.
In between the interpreter may do what need not wait, such as making shields.

``link`` is of a :class:`RowLink`, ``bell`` and ``words`` of a :class:`gelo.slab.Doorbell`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from gelo.atomics import monotonic_ns
from gelo.doorbell_kernels import WORDS, answered, ring_request, wait_header
from gelo.header import OffloadHeader, OperandKind
from tee_runner.errors import WorkerProtocolError
from tee_runner.memory import on_lines
from tee_runner.profile import Profile
from tee_runner.protection.base import Float32, Linear, require_finite
from tee_runner.protection.gelo.decode_row import (
    SUMMED_ROWS,
    row_alone,
    row_back,
    send_dense,
    send_hd3,
    send_plain,
)
from tee_runner.protection.gelo.tiles import LANES
from tee_runner.protection.integrity import Integrity
from tee_runner.protection.integrity_kernels import project, wrong_rows
from tee_runner.simd import float_pointer, half_pointer
from tee_runner.worker.slab_transport import SlabTransport
from tee_runner.worker.transport import Transport, check_answer

# Words of a link: the request, then addresses.
_WEIGHT_ID, _ROWS, _D_IN, _D_OUT, _OPERAND, _SENT, _RESULT, _V, _Z = range(9)
_HALF: Final = int(OperandKind.HALF)
# Words of a tally: when the last request was rung, then sums of nanoseconds, offloads and bytes.
_RUNG, _APPLY, _CHECK, _COMPUTE, _WIRE, _EXCHANGE, _SAID, _OFFLOADS, _SENT_BYTES, _RECEIVED_BYTES, _BACK = (
    range(11)
)
_LONGEST: Final = 1 << 62
# Floats that the check of one offload takes: of each row what is expected, what came, and the tolerance.
_SUMS: Final = 5 * max(SUMMED_ROWS)


class Heard(IntEnum):
    """How :func:`hear` ended."""

    RIGHT = 0
    NOTHING = 1  # no answer yet: call again
    OTHER = 2  # not an answer to this request
    WRONG = 3  # not the product
    UNFIT = 4  # the operand was not finite
    NOT_FINITE = 5  # the row that came back is not finite


@numba.njit(nogil=True, cache=True)
def _operands(link: Any) -> Any:
    """The operand that the check reads, and what is sent: one and the same without checks."""
    shape = (link[_ROWS], link[_D_IN])
    own, sent = half_pointer(link[_OPERAND]), half_pointer(link[_SENT])
    return numba.carray(own, shape), numba.carray(sent, shape)


@numba.njit(nogil=True, cache=True)
def _ask(link: Any, bell: Any, begin: int, tally: Any) -> bool:
    now = monotonic_ns()
    tally[_APPLY] += now - begin
    tally[_RUNG] = now
    return bool(ring_request(bell, link[_WEIGHT_ID], link[_ROWS], link[_D_IN], link[_D_OUT], _HALF))


@numba.njit(nogil=True, cache=True)
def ask_plain(rows: Any, link: Any, bell: Any, begin: int, tally: Any) -> Any:
    """:func:`send_plain` and ring. Its factor, and whether the worker sleeps."""
    operand, sent = _operands(link)
    factor = send_plain(rows, operand, sent)
    return factor, _ask(link, bell, begin, tally)


@numba.njit(nogil=True, cache=True)
def ask_dense(
    rows: Any, normals: Any, mask: Any, scratch: Any, link: Any, bell: Any, begin: int, tally: Any
) -> Any:
    """:func:`send_dense` and ring. Its factor, and whether the worker sleeps."""
    operand, sent = _operands(link)
    factor = send_dense(rows, normals, mask, operand, sent, scratch)
    return factor, _ask(link, bell, begin, tally)


@numba.njit(nogil=True, cache=True)
def ask_hd3(rows: Any, normals: Any, signs: Any, link: Any, bell: Any, begin: int, tally: Any) -> Any:
    """:func:`send_hd3` and ring. Its factor, and whether the worker sleeps."""
    operand, sent = _operands(link)
    factor = send_hd3(rows, normals, signs, operand, sent)
    return factor, _ask(link, bell, begin, tally)


@numba.njit(nogil=True, cache=True)
def hear(
    link: Any, gain: float, bell: Any, words: Any, spins: int, busy: int, inverse_row: Any, factor: float,
    out: Any, sums: Any, tally: Any,
) -> int:  # fmt: skip
    """Wait for the answer to what was asked last, check it and take the row back; a :class:`Heard`.

    ``gain`` is the tolerance for an operand row of norm 1; ``busy`` what else was done since it was
    asked, nanoseconds; ``out`` ``(1, d_out)`` f32 may be used if all is right; ``sums``, f64 of
    :data:`_SUMS`, are secret.
    """
    rows, d_in, d_out = link[_ROWS], link[_D_IN], link[_D_OUT]
    expected, own = sums[: 2 * rows].reshape(rows, 2), sums[2 * rows : 4 * rows].reshape(rows, 2)
    tolerance = sums[4 * rows : 5 * rows]
    checked = link[_V] != 0
    started = monotonic_ns()
    if checked:
        project(
            numba.carray(half_pointer(link[_OPERAND]), (rows, d_in)),
            numba.carray(float_pointer(link[_Z]), (2, d_in)), gain, expected, tolerance,
        )  # fmt: skip
    projected = monotonic_ns()
    if not wait_header(bell[1], bell[5], spins, bell[0], words):
        return Heard.NOTHING
    bell[5] = words[WORDS]
    now = monotonic_ns()
    # What the worker says it took is for profiles only, and may be anything.
    words[6] = min(words[6], _LONGEST) if words[6] >= 0 else _LONGEST
    said = answered(words, bell[6], link[_WEIGHT_ID], rows, d_in, d_out, _HALF)
    if said < 0:
        return Heard.OTHER
    exchanged, busy = now - tally[_RUNG], busy + projected - started
    waited = max(0, exchanged - busy)
    computed = min(waited, max(0, said - busy))
    tally[_COMPUTE] += computed
    tally[_WIRE] += waited - computed
    tally[_EXCHANGE] += exchanged
    tally[_SAID] += said
    tally[_OFFLOADS] += 1
    tally[_SENT_BYTES] += rows * d_in * 2
    tally[_RECEIVED_BYTES] += rows * d_out * 4
    result = numba.carray(float_pointer(link[_RESULT]), (rows, d_out))
    if not checked:
        bad = row_alone(result, inverse_row, factor, out)
        tally[_BACK] += monotonic_ns() - now
        return Heard.NOT_FINITE if bad else Heard.RIGHT
    v = numba.carray(float_pointer(link[_V]), (2, d_out))
    bad = row_back(result, inverse_row, factor, out, v, own)
    wrong = wrong_rows(own, expected, tolerance, 0, rows)
    tally[_CHECK] += projected - started + monotonic_ns() - now
    if wrong:
        return Heard.WRONG if np.isfinite(tolerance).all() else Heard.UNFIT
    return Heard.NOT_FINITE if bad else Heard.RIGHT


class RowLink:
    """What both calls need to know of one weight, as words; good as long as the session."""

    def __init__(
        self, transport: SlabTransport, integrity: Integrity | None, weight: Linear,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """``operand`` ``(s, d_in)`` is what the check reads: not memory that the worker could change."""
        self.weight = weight
        self.bell = transport.doorbell.state
        (s, d_in), d_out = operand.shape, weight.d_out
        # Kept here, where their addresses are used.
        self.held: tuple[NDArray[Any], ...] = (
            operand, transport.operand(s, d_in), transport.result(s, d_out)
        )  # fmt: skip
        self.gain = 0.0
        if integrity is not None:
            v, z, self.gain = integrity.projection(weight.weight_id, s)
            self.held += (v, z)
        addresses = [array.ctypes.data for array in self.held] + [0, 0]
        self.words: NDArray[np.int64] = np.array(
            [weight.weight_id, s, d_in, d_out, *addresses[:5]], dtype=np.int64
        )


class RowOffloads:
    """The single rows of one session. ``tally`` is what compiled code adds up."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport if isinstance(transport, SlabTransport) else None
        self._stats = transport.stats
        self.tally: NDArray[np.int64] = np.zeros(_BACK + 1, dtype=np.int64)
        self._sums: NDArray[np.float64] = np.zeros(_SUMS)
        # By weight and operand rows; and by shape where operands are written.
        self._links: dict[tuple[int, int], RowLink] = {}
        self._operands: dict[tuple[int, int], NDArray[np.uint16]] = {}

    def link(self, integrity: Integrity | None, weight: Linear, s: int) -> RowLink | None:
        """For one data row in an operand of ``s`` rows. None if it must take the general way.

        That is with another number of probes than two, without a doorbell, or if columns would be left over.

        Raises:
            IntegrityError: the session is over.
        """
        key = weight.weight_id, s
        if key in self._links and (integrity is None or not integrity.over):
            return self._links[key]
        transport = self._transport
        if transport is None or weight.d_out % LANES or (integrity is not None and integrity.probes != 2):
            return None
        shape = s, weight.d_in
        if integrity is None:
            operand = transport.operand(*shape).view(np.uint16)
        else:
            operand = self._operands.setdefault(shape, on_lines(shape, np.uint16))
        link = self._links[key] = RowLink(transport, integrity, weight, operand)
        return link

    def wake(self) -> None:
        """Wake the worker, if :func:`ask_plain` or another says that it sleeps.

        Raises:
            WorkerUnavailableError: it is gone.
        """
        if self._transport is not None:
            self._transport.wake()

    def hear(
        self, link: RowLink, integrity: Integrity | None, inverse_row: Float32, factor: float, out: Float32,
        busy: int,
    ) -> None:  # fmt: skip
        """The answer to what was asked last, into ``out`` ``(1, d_out)``; see :func:`hear`.

        Raises:
            WorkerError: the worker failed, or its answer cannot be used.
            GeloError: the row was not finite.
        """
        if self._transport is None:
            raise ValueError("nothing was asked through a doorbell")
        bell = self._transport.doorbell
        row = (inverse_row, factor, out, self._sums, self.tally)
        while True:
            heard = hear(link.words, link.gain, link.bell, bell.words, bell.spins, busy, *row)
            if heard == Heard.RIGHT:
                return
            if heard != Heard.NOTHING:
                break
            self._transport.until_answered()
        weight = link.weight
        if heard == Heard.OTHER:
            asked = OffloadHeader(bell.rung, weight.weight_id, len(link.held[0]), weight.d_in, weight.d_out)
            check_answer(asked, bell.words[:WORDS].tobytes())
            raise WorkerProtocolError("The worker answered another request than the one it was sent.")
        if integrity is not None and heard != Heard.NOT_FINITE:
            integrity.refuse(weight.name, finite=heard == Heard.WRONG)
        require_finite(True, weight)

    def settle(self, profile: Profile) -> None:
        """At the end of a pass: account for its offloads, and overwrite what was checked."""
        words, stats = self.tally.tolist(), self._stats
        profile.add("mask apply", words[_APPLY])
        profile.add("check", words[_CHECK])
        profile.add("unapply", words[_BACK])
        profile.add("worker compute", words[_COMPUTE])
        profile.add("wire", words[_WIRE])
        stats.exchange_ns += words[_EXCHANGE]
        stats.worker_ns += words[_SAID]
        stats.offloads += words[_OFFLOADS]
        stats.bytes_sent += words[_SENT_BYTES]
        stats.bytes_received += words[_RECEIVED_BYTES]
        self.tally.fill(0)
        self._sums.fill(0.0)
