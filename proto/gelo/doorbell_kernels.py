"""Ringing and waiting without the interpreter: headers as eight int64 words.

The words are the bytes of :mod:`gelo.header`, little-endian. Addresses are plain integers.
"""

from __future__ import annotations

from typing import Any

import numba

from gelo.atomics import atomic_load, atomic_store, plain_load, plain_store, yield_cpu
from gelo.header import HEADER_BYTES, MAX_DIMENSION, MAX_ROWS, PREAMBLE, OperandKind
from gelo.processors import current_processor

WORDS = HEADER_BYTES // 8
# Words that a wait fills: the header, the bell's word, and the processor that it was rung on.
HEARD_WORDS = WORDS + 2
_LOW = 0xFFFFFFFF
_KINDS = len(OperandKind)


@numba.njit(nogil=True, cache=True)
def ring_header(
    header: int, word: int, ring: int, sleeps: int, sequence: int, weight_id: int, rows: int, d_in: int,
    d_out: int, compute_ns: int, kind: int,
) -> bool:  # fmt: skip
    """Write a header of status OK, then ``ring`` to ``word``; True if the other side sleeps.

    Behind ``word``, in its cache line, goes the processor of the caller.
    """
    plain_store(header, PREAMBLE)
    plain_store(header + 8, sequence)
    plain_store(header + 16, weight_id | rows << 32)
    plain_store(header + 24, d_in | d_out << 32)
    plain_store(header + 32, 0)
    plain_store(header + 40, 0)
    plain_store(header + 48, compute_ns)
    plain_store(header + 56, kind)
    plain_store(word + 8, current_processor())
    atomic_store(word, ring)
    return bool(atomic_load(sleeps) != 0)


@numba.njit(nogil=True, cache=True)
def ring_request(bell: Any, weight_id: int, rows: int, d_in: int, d_out: int, kind: int) -> bool:
    """Ring with a request under the next number; ``bell`` is the :attr:`gelo.slab.Doorbell.state`.

    True if the other side sleeps.
    """
    bell[6] += 1
    return bool(
        ring_header(bell[2], bell[3], bell[6], bell[4], bell[6], weight_id, rows, d_in, d_out, 0, kind)
    )


@numba.njit(nogil=True, cache=True)
def wait_header(word: int, seen: int, spins: int, header: int, words: Any) -> bool:
    """Wait until ``word`` differs from ``seen``, then copy the other side's header to ``words``.

    ``words`` ``(HEARD_WORDS,)`` int64: behind the header what was in ``word`` and in the word after it.
    False after ``spins`` yields.
    """
    for _ in range(spins):
        if atomic_load(word) != seen:
            break
        yield_cpu()
    words[WORDS] = atomic_load(word)
    if words[WORDS] == seen:
        return False
    words[WORDS + 1] = plain_load(word + 8)
    for i in range(WORDS):
        words[i] = plain_load(header + 8 * i)
    return True


@numba.njit(nogil=True, cache=True)
def answered(words: Any, sequence: int, weight_id: int, rows: int, d_in: int, d_out: int, kind: int) -> int:
    """``compute_ns`` if ``words`` are a good answer to exactly this request, else -1."""
    good = words[0] == PREAMBLE and words[1] == sequence and words[7] == kind
    good = good and words[2] == (weight_id | rows << 32) and words[3] == (d_in | d_out << 32)
    return words[6] if good and words[6] >= 0 else -1


@numba.njit(nogil=True, cache=True)
def well_formed(words: Any) -> bool:
    """Whether ``words`` are a request of a known kind whose sizes are in bounds."""
    rows, d_in, d_out = words[2] >> 32 & _LOW, words[3] & _LOW, words[3] >> 32 & _LOW
    good = words[0] == PREAMBLE and 0 <= words[7] < _KINDS and 0 < rows <= MAX_ROWS
    return bool(good and 0 < d_in <= MAX_DIMENSION and 0 < d_out <= MAX_DIMENSION)
