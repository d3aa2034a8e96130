"""The shared-memory slab and its doorbell.

A slab is an anonymous memory file that the runner creates, seals against resizing and hands
to the worker over a unix socket. Layout::

    0      control page: the words below, the request header and the response header
    4096   operand area   (rows, d_in) float16 or uint32
    ...    result area    (rows, d_out) float32 or uint32, page aligned

To ring, a side writes its 64-byte header, then stores the sequence number in its word. The
other side spins on that word for a bounded number of yields, then announces in its
``sleeping`` word that it will block on the socket; a ringer that sees the announcement sends
one byte. Compiled code also writes the processor that it rings on, behind its word: threads that
spin had better not share one. Both sides treat every byte of the slab as written by an adversary: headers are
copied out once and checked, offsets are bounded, results are read once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gelo.atomics import load_word, store_word
from gelo.doorbell_kernels import HEARD_WORDS, WORDS, ring_header, wait_header
from gelo.header import HEADER_BYTES, OperandKind

CONTROL_BYTES = 4096
MAX_SLAB_BYTES = 1 << 36
_PAGE = 4096
_FLOAT16, _FLOAT32, _UINT32 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint32)
# Shapes whose views are kept: prompts have many lengths.
_MAX_VIEWS = 1 << 10
# Each word on a cache line of its own.
_REQUEST_WORD, _RESPONSE_WORD = 0, 64
_RUNNER_SLEEPS, _WORKER_SLEEPS = 128, 192
_REQUEST_HEADER, _RESPONSE_HEADER = 256, 320
_SEEN, _RUNG = 5, 6

_ATTACH = struct.Struct("<16sQQ")
ATTACH_BYTES = _ATTACH.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlabError(ValueError):
    """The other side offered a slab, or an attach message, that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSizes:
    """Capacities in bytes of the two areas."""

    operand: int
    result: int

    def __post_init__(self) -> None:
        if self.operand <= 0 or self.result <= 0 or self.total > MAX_SLAB_BYTES:
            raise SlabError(f"slab areas of {self.operand} and {self.result} bytes are out of bounds")

    @property
    def result_start(self) -> int:
        """Offset of the result area."""
        return CONTROL_BYTES + -(-self.operand // _PAGE) * _PAGE

    @property
    def total(self) -> int:
        """Size of the whole memory file."""
        return self.result_start + -(-self.result // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachMessage:
    """What the runner sends with the memory file's descriptor."""

    session_id: bytes
    sizes: SlabSizes

    def pack(self) -> bytes:
        """The bytes on the socket."""
        return _ATTACH.pack(self.session_id, self.sizes.operand, self.sizes.result)

    @classmethod
    def unpack(cls, data: bytes) -> AttachMessage:
        """Parse.

        Raises:
            SlabError: wrong length or sizes out of bounds.
        """
        if len(data) != ATTACH_BYTES:
            raise SlabError(f"an attach message has {ATTACH_BYTES} bytes, got {len(data)}")
        session_id, operand, result = _ATTACH.unpack(data)
        return cls(session_id=session_id, sizes=SlabSizes(operand=operand, result=result))


class Slab:
    """A mapped slab. ``memory`` is the whole file as uint8."""

    def __init__(self, descriptor: int, sizes: SlabSizes) -> None:
        self.sizes = sizes
        self._map = mmap.mmap(descriptor, sizes.total)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._views: dict[tuple[int, str, int, int], NDArray[Any]] = {}
        self._base = int(self.memory.ctypes.data)

    @classmethod
    def create(cls, sizes: SlabSizes) -> tuple[Slab, int]:
        """A new sealed slab and its descriptor, which the caller sends and then closes.

        The seals keep the other side from shrinking the file, which would kill this process
        with SIGBUS at its next access.
        """
        descriptor = os.memfd_create("gelo-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, sizes.total)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, sizes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, sizes: SlabSizes) -> Slab:
        """Map a slab received from the other side.

        Raises:
            SlabError: the file is not sealed or not of the announced size.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SlabError("the slab is not a memory file") from error
        if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != sizes.total:
            raise SlabError("the slab is not sealed, or not of the announced size")
        return cls(descriptor, sizes)

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        """The operand area as ``(rows, d_in)`` float16."""
        return self._area(CONTROL_BYTES, self.sizes.operand, rows, d_in, _FLOAT16)

    def result(self, rows: int, d_out: int) -> NDArray[np.float32]:
        """The result area as ``(rows, d_out)`` float32."""
        return self._area(self.sizes.result_start, self.sizes.result, rows, d_out, _FLOAT32)

    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        """The operand area as ``(rows, d_in)`` uint32."""
        return self._area(CONTROL_BYTES, self.sizes.operand, rows, d_in, _UINT32)

    def result_words(self, rows: int, d_out: int) -> NDArray[np.uint32]:
        """The result area as ``(rows, d_out)`` uint32."""
        return self._area(self.sizes.result_start, self.sizes.result, rows, d_out, _UINT32)

    def areas(self) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint32]]:
        """The whole operand area as float16 bits and as uint32, and the whole result area as bits."""
        operand = self.memory[CONTROL_BYTES : self.sizes.result_start]
        start = self.sizes.result_start
        result = self.memory[start : start + self.sizes.result // 4 * 4]
        halves, words = (operand[: self.sizes.operand // size * size] for size in (2, 4))
        return halves.view(np.uint16), words.view(np.uint32), result.view(np.uint32)

    def _area(self, start: int, capacity: int, rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        view = self._views.get((start, dtype.char, rows, columns))
        if view is not None:
            return view
        size = rows * columns * dtype.itemsize
        if rows <= 0 or columns <= 0 or size > capacity:
            raise SlabError(f"{rows} x {columns} {dtype} does not fit an area of {capacity} bytes")
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self.memory[start : start + size].view(dtype).reshape(rows, columns)
        self._views[start, dtype.char, rows, columns] = view
        return view

    def word(self, offset: int) -> int:
        """Address of the control word at ``offset``."""
        return self._base + offset

    def write_header(self, offset: int, header: bytes) -> None:
        """Write a header, before its word is stored."""
        self.memory[offset : offset + HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)


class DoorbellClosedError(ConnectionError):
    """The other side is gone."""


class DoorbellTimeoutError(TimeoutError):
    """The other side did not ring in time."""


class Doorbell:
    """One side of the doorbell: ring the other, wait to be rung.

    ``spins`` bounds the yielding spin before blocking. A yield costs roughly 0.3 to 1 µs.
    """

    def __init__(self, slab: Slab, peer: socket.socket, *, runner: bool, spins: int) -> None:
        self._slab = slab
        self._peer = peer
        self._spins = spins
        mine, theirs = (_REQUEST_WORD, _RESPONSE_WORD) if runner else (_RESPONSE_WORD, _REQUEST_WORD)
        headers = (_REQUEST_HEADER, _RESPONSE_HEADER)
        self._my_header, self._their_header = headers if runner else headers[::-1]
        self._my_word, self._their_word = slab.word(mine), slab.word(theirs)
        sleeps = (_RUNNER_SLEEPS, _WORKER_SLEEPS)
        my_sleep, their_sleep = sleeps if runner else sleeps[::-1]
        self._my_sleep, self._their_sleep = slab.word(my_sleep), slab.word(their_sleep)
        # For compiled loops: addresses of their header and word, of my header and word and of their
        # sleep word; what was in their word last; what was rung last.
        self.state: NDArray[np.int64] = np.array(
            [
                slab.word(self._their_header), self._their_word, slab.word(self._my_header), self._my_word,
                self._their_sleep, 0, 0,
            ],
            dtype=np.int64,
        )  # fmt: skip
        # As wait_header fills them: the header received last and what stood with its word.
        self.words: NDArray[np.int64] = np.zeros(HEARD_WORDS, dtype=np.int64)

    @property
    def _seen(self) -> int:
        return int(self.state[_SEEN])

    @property
    def spins(self) -> int:
        """Yields before this side blocks."""
        return self._spins

    @property
    def rung(self) -> int:
        """The sequence number rung last."""
        return int(self.state[_RUNG])

    def ring_offload(
        self, sequence: int, weight_id: int, rows: int, d_in: int, d_out: int, kind: int = OperandKind.HALF
    ) -> None:
        """:meth:`ring` with the header of a request for this product.

        Raises:
            DoorbellClosedError: the other side is gone.
        """
        self.state[_RUNG] = sequence
        if ring_header(
            self._slab.word(self._my_header), self._my_word, sequence, self._their_sleep, sequence,
            weight_id, rows, d_in, d_out, 0, int(kind),
        ):  # fmt: skip
            self.wake()

    def ring(self, sequence: int, header: bytes) -> None:
        """Publish ``header`` under ``sequence`` (> 0, different from the last one).

        Raises:
            DoorbellClosedError: the other side is gone.
        """
        self.state[_RUNG] = sequence
        self._slab.write_header(self._my_header, header)
        store_word(self._my_word, sequence)
        if load_word(self._their_sleep):
            self.wake()

    def wake(self) -> None:
        """Wake the other side, which announced that it sleeps.

        Raises:
            DoorbellClosedError: the other side is gone.
        """
        try:
            self._peer.send(b"\1", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # a wake-up is already queued
        except OSError as error:
            raise DoorbellClosedError("the other side closed its doorbell") from error

    @property
    def answered(self) -> bool:
        """Whether the other side rang since the last wait: the next one returns at once."""
        return load_word(self._their_word) != self._seen

    def wait(self, timeout: float | None) -> bytes:
        """The other side's next header (64 bytes, private copy, unchecked).

        Raises:
            DoorbellTimeoutError: nothing within ``timeout`` seconds.
            DoorbellClosedError: the other side is gone.
        """
        return self.wait_words(timeout)[:WORDS].tobytes()

    def wait_words(self, timeout: float | None) -> NDArray[np.int64]:
        """:meth:`wait`; the header as eight int64 words, valid until the next call."""
        words, header = self.words, self._slab.word(self._their_header)
        if not wait_header(self._their_word, self._seen, self._spins, header, words):
            self.until_rung(timeout)
            wait_header(self._their_word, self._seen, 0, header, words)
        self.state[_SEEN] = words[WORDS]
        return words

    def until_rung(self, timeout: float | None) -> None:
        """Block until the other side has rung since the last wait.

        Raises:
            As :meth:`wait`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        store_word(self._my_sleep, 1)
        try:
            while load_word(self._their_word) == self._seen:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DoorbellTimeoutError("no answer on the doorbell in time")
                poller = select.poll()
                poller.register(self._peer, select.POLLIN)
                if not poller.poll(None if left is None else max(1, int(left * 1000))):
                    continue
                try:
                    data = self._peer.recv(16, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise DoorbellClosedError("the doorbell broke") from error
                if not data and load_word(self._their_word) == self._seen:
                    raise DoorbellClosedError("the other side closed its doorbell")
        finally:
            store_word(self._my_sleep, 0)
