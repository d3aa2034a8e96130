"""The doorbell and offloads through a slab, as seen by well- and ill-behaved clients."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

from gelo.header import OffloadHeader, OperandKind, Status
from gelo.slab import AttachMessage, DoorbellClosedError, Slab, SlabSizes

from .conftest import HANG_GUARD_S, Service, StartService, Weight, integer_weight, make_weight
from .service_calls import SIZES, WEIGHT, attach, attached, compute, header, operand_of


def test_offloads_through_a_slab(service: Service) -> None:
    service.upload(WEIGHT)
    slab, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    with peer:
        for sequence in range(1, 50):
            rows = 1 + sequence % 9
            slab.operand(rows, 4)[...] = operand_of(rows)
            doorbell.ring(sequence, header(sequence=sequence, rows=rows).pack())
            answer = OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S))
            assert (answer.status, answer.sequence, answer.rows) == (Status.OK, sequence, rows)
            expected = operand_of(rows).astype(np.float32) @ WEIGHT.values.T
            np.testing.assert_array_equal(slab.result(rows, 6), expected)


@pytest.mark.parametrize(
    "changes",
    [{"weight_id": 1}, {"d_in": 5}, {"rows": 513}, {"rows": 342}, {"rows": 1 << 20}],
    ids=["weight", "shape", "operand-area", "result-area", "rows"],
)
def test_bad_slab_offloads_are_answered_and_the_session_goes_on(
    service: Service, changes: dict[str, int]
) -> None:
    service.upload(WEIGHT)
    _, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    with peer:
        doorbell.ring(1, header(**changes).pack())
        assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.BAD_REQUEST
        doorbell.ring(2, header(sequence=2).pack())
        assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.OK


@pytest.mark.parametrize("bits", [8, 16])
def test_words_through_a_slab(service: Service, bits: int) -> None:
    weight = integer_weight(6, 4, bits=bits)
    service.upload(weight, WEIGHT)
    slab, doorbell, peer = attached(service, service.open(weight, WEIGHT, doorbell=True))
    with peer:
        for sequence in range(1, 30):
            rows = 1 + sequence % 9
            words = np.random.default_rng(sequence).integers(0, 1 << 32, (rows, 4), dtype=np.uint32)
            slab.operand_words(rows, 4)[...] = words
            doorbell.ring_offload(sequence, 0, rows, 4, 6, OperandKind.WORDS)
            answer = OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S))
            assert (answer.status, answer.sequence, answer.kind) == (Status.OK, sequence, OperandKind.WORDS)
            expected = words @ weight.values.astype(np.uint32).T
            np.testing.assert_array_equal(slab.result_words(rows, 6), expected)
            slab.operand(rows, 4)[...] = operand_of(rows)
            doorbell.ring_offload(sequence + 1000, 1, rows, 4, 6)
            assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.OK
            halves = operand_of(rows).astype(np.float32) @ WEIGHT.values.T
            np.testing.assert_array_equal(slab.result(rows, 6), halves)


@pytest.mark.parametrize("weight", [WEIGHT, integer_weight(6, 4)])
def test_the_other_kind_is_refused_in_a_slab(service: Service, weight: Weight) -> None:
    service.upload(weight)
    slab, doorbell, peer = attached(service, service.open(weight, doorbell=True))
    slab.memory[SIZES.result_start :] = 0xA5
    with peer:
        kind = weight.format.kind
        for sequence, (sent, status) in enumerate(
            [(OperandKind(1 - kind), Status.BAD_REQUEST), (kind, Status.OK)], start=1
        ):
            doorbell.ring_offload(sequence, 0, 2, 4, 6, sent)
            answer = OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S))
            assert (answer.status, answer.kind) == (status, sent)
            written = SIZES.result_start + (48 if status == Status.OK else 0)
            assert (slab.memory[written:] == 0xA5).all()
        # Words fill the operand's area with half as many rows.
        rows = SIZES.operand // (4 * kind.item_bytes) + 1
        doorbell.ring_offload(3, 0, rows, 4, 6, kind)
        assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.BAD_REQUEST


def test_offsets_in_a_header_move_nothing(service: Service) -> None:
    """The worker computes offsets itself: those in the header cannot point outside the areas."""
    service.upload(WEIGHT)
    slab, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    with peer:
        slab.operand(2, 4)[...] = operand_of()
        doorbell.ring(1, header(operand_offset=2**64 - 1, result_offset=2**63).pack())
        assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.OK
        np.testing.assert_array_equal(slab.result(2, 6), operand_of().astype(np.float32) @ WEIGHT.values.T)


def test_a_bad_slab_header_ends_the_session(start_service: StartService) -> None:
    service = start_service(weight_memory=48)
    service.upload(WEIGHT)
    _, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    with peer:
        doorbell.ring(1, b"?" * 64)
        with pytest.raises(DoorbellClosedError):
            doorbell.wait(HANG_GUARD_S)
    service.upload(make_weight(6, 4, seed=7))


def refused(service: Service, message: bytes, descriptors: list[int]) -> bool:
    path = service.open(doorbell=True).doorbell_path
    peer, answer = attach(path, message, descriptors)
    peer.close()
    return answer == b""


def test_attach_is_refused(service: Service) -> None:
    good = service.open(doorbell=True)
    slab, descriptor = Slab.create(SIZES)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZES.total)
    message = AttachMessage(session_id=good.session_id, sizes=SIZES).pack()
    larger = AttachMessage(session_id=good.session_id, sizes=SlabSizes(operand=4096, result=12289)).pack()
    reader, writer = os.pipe()
    assert refused(service, message[:-1], [descriptor])
    assert refused(service, message + b"\0", [descriptor])
    assert refused(service, message[:16] + bytes(16), [descriptor])
    assert refused(service, message[:16] + b"\xff" * 16, [descriptor])
    assert refused(service, message, [])
    assert refused(service, message, [unsealed])
    assert refused(service, message, [writer])
    assert refused(service, larger, [descriptor])
    assert refused(service, bytes(16) + message[16:], [descriptor])
    # None of that spent the session; and once it is attached, it is taken.
    peer, answer = attach(good.doorbell_path, message, [descriptor])
    assert answer == b"ok"
    assert refused(service, message, [descriptor])
    with pytest.raises(grpc.RpcError):
        list(compute(service, good.session_id))
    peer.close()
    for number in (descriptor, unsealed, reader, writer):
        os.close(number)
    assert slab.sizes == SIZES


def test_a_client_that_hangs_up_while_attaching_harms_nobody(service: Service) -> None:
    service.upload(WEIGHT)
    session = service.open(WEIGHT, doorbell=True)
    for message in (b"", b"x"):
        attach(session.doorbell_path, message or b"\0", [], hang_up=True)[0].close()
    _, doorbell, peer = attached(service, session)
    with peer:
        doorbell.ring(1, header().pack())
        assert OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S)).status == Status.OK


def test_the_doorbell_directory_is_private_and_goes_away(start_service: StartService) -> None:
    service = start_service()
    path = Path(service.open(doorbell=True).doorbell_path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    service.running.stop()
    assert not path.parent.exists()


def test_stopping_ends_attached_sessions(start_service: StartService) -> None:
    service = start_service()
    service.upload(WEIGHT)
    _, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    with peer:
        doorbell.ring(1, header().pack())
        doorbell.wait(HANG_GUARD_S)
        service.running.stop()
        assert service.engine.closed
        with pytest.raises(DoorbellClosedError):
            doorbell.wait(HANG_GUARD_S)


def test_stopping_ends_a_session_that_never_pauses(start_service: StartService) -> None:
    service = start_service()
    service.upload(WEIGHT)
    slab, doorbell, peer = attached(service, service.open(WEIGHT, doorbell=True))
    ended: list[Exception] = []

    def ring_without_end() -> None:
        try:
            for sequence in range(1, 1 << 30):
                doorbell.ring(sequence, header(sequence=sequence).pack())
                doorbell.wait(HANG_GUARD_S)
        except DoorbellClosedError as error:
            ended.append(error)

    with peer:
        runner = threading.Thread(target=ring_without_end)
        runner.start()
        threading.Event().wait(0.05)
        service.running.stop()
        runner.join(HANG_GUARD_S)
    assert ended
    assert slab.sizes == SIZES
