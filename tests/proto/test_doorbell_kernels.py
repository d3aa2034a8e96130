"""Headers as words, in compiled code: the same reading as in :mod:`gelo.header`, bit for bit."""

from __future__ import annotations

import contextlib
import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.doorbell_kernels import (
    HEARD_WORDS,
    WORDS,
    answered,
    ring_header,
    wait_header,
    well_formed,
)
from gelo.header import MAX_DIMENSION, MAX_ROWS, HeaderError, OffloadHeader, OperandKind, Status

u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)
requests = st.builds(
    OffloadHeader, sequence=u63, weight_id=u32, rows=st.integers(1, MAX_ROWS),
    d_in=st.integers(1, MAX_DIMENSION), d_out=st.integers(1, MAX_DIMENSION), compute_ns=u63,
    kind=st.sampled_from(OperandKind), operand_offset=st.just(0), result_offset=st.just(0),
    status=st.just(Status.OK),
)  # fmt: skip


def as_words(data: bytes) -> NDArray[np.int64]:
    """As ``wait_header`` leaves them."""
    return np.append(np.frombuffer(data, dtype=np.int64), 0)


def asked(header: OffloadHeader) -> tuple[int, ...]:
    return (
        header.sequence, header.weight_id, header.rows, header.d_in, header.d_out, int(header.kind)
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(requests)
def test_what_is_rung_is_what_is_packed(header: OffloadHeader) -> None:
    memory = np.full(24, -1, dtype=np.int64)
    memory[16] = 0
    base = int(memory.ctypes.data)
    sequence, weight_id, rows, d_in, d_out, kind = asked(header)
    arguments = (sequence, weight_id, rows, d_in, d_out, header.compute_ns, kind)
    assert not ring_header(base, base + 8 * 8, 77, base + 8 * 16, *arguments)
    assert memory[:WORDS].tobytes() == header.pack()
    assert memory[8] == 77
    assert memory[9] in os.sched_getaffinity(0)
    heard = np.zeros(HEARD_WORDS, dtype=np.int64)
    assert not wait_header(base + 8 * 8, 77, 3, base, heard)
    assert wait_header(base + 8 * 8, 76, 0, base, heard)
    assert heard[:WORDS].tobytes() == header.pack()
    assert (heard[WORDS], heard[WORDS + 1]) == (77, memory[9])
    memory[16] = 1
    assert ring_header(base, base + 8 * 8, 78, base + 8 * 16, *arguments)


@settings(max_examples=100, deadline=None)
@given(requests)
def test_an_answer_to_the_request_and_to_no_other(header: OffloadHeader) -> None:
    words = as_words(header.pack())
    good = asked(header)
    assert answered(words, *good) == header.compute_ns
    for place in range(len(good)):
        other = list(good)
        other[place] ^= 1
        assert answered(words, *other) == -1
    # Any single bit that is not of compute_ns.
    for bit in (*range(0, 256, 7), *range(448, 512, 5)):
        changed = words.copy()
        changed.view(np.uint64)[bit // 64] ^= np.uint64(1 << bit % 64)
        assert answered(changed, *good) == -1


near = st.sampled_from([0, 1, MAX_ROWS, MAX_ROWS + 1, MAX_DIMENSION, MAX_DIMENSION + 1]) | u32


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([0, 0, 0, 1, 2, 3, 1 << 15]), near, near, near,
    st.integers(0, 3) | st.sampled_from([1 << 8, 1 << 32, 1 << 63, 2**64 - 1]),
    st.sampled_from([0, 0, 0, 1 << 3, 1 << 40]),
)  # fmt: skip
def test_compiled_code_and_the_parser_agree_on_requests(
    status: int, rows: int, d_in: int, d_out: int, kind: int, magic: int
) -> None:
    raw = bytearray(OffloadHeader(sequence=1, weight_id=2, rows=rows, d_in=d_in, d_out=d_out).pack())
    raw[6:8] = status.to_bytes(2, "little")
    raw[56:] = kind.to_bytes(8, "little")
    raw[:8] = (int.from_bytes(raw[:8], "little") ^ magic).to_bytes(8, "little")
    parsed = None
    with contextlib.suppress(HeaderError):
        parsed = OffloadHeader.unpack(bytes(raw))
    expected = parsed is not None and parsed.status == Status.OK
    assert well_formed(as_words(bytes(raw))) == expected
