"""Sessions: limits, one attach each, stale ones, and what happens to offloads of a closed one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gelo.formats import WeightFormat
from gelo.header import OffloadHeader, OperandKind, Status
from gpu_worker import session as session_module
from gpu_worker.lock import EngineLock
from gpu_worker.session import Sessions, fits
from gpu_worker.weights import UploadError, WeightStore, weight_key

from .conftest import NumpyEngine, integer_weight, make_weight


class Fixture:
    """A store with one resident 6 x 4 weight, and its sessions."""

    def __init__(self, limit: int = 3) -> None:
        self.engine = NumpyEngine()
        lock = threading.RLock()
        self.store = WeightStore(self.engine, lock, capacity=48)
        self.sessions = Sessions(self.engine, self.store, lock, limit=limit)
        self.weight = make_weight(6, 4)
        self.store.add(self.weight.digest, 4, 6, WeightFormat.FLOAT16, [self.weight.data])
        self.key = weight_key(self.weight.digest, 4, 6, WeightFormat.FLOAT16)

    def replace_weight(self) -> None:
        """Upload another weight, for which the first must go."""
        other = make_weight(6, 4, seed=1)
        self.store.add(other.digest, 4, 6, WeightFormat.FLOAT16, [other.data])


def header(**changes: int) -> OffloadHeader:
    return OffloadHeader(**{"sequence": 1, "weight_id": 0, "rows": 2, "d_in": 4, "d_out": 6} | changes)


def test_session_ids_are_16_unpredictable_bytes() -> None:
    fixture = Fixture(limit=50)
    ids = {fixture.sessions.open([fixture.key]).session_id for _ in range(50)}
    assert len(ids) == 50
    assert {len(i) for i in ids} == {16}


def test_the_limit_holds_until_one_is_closed() -> None:
    fixture = Fixture(limit=2)
    first = fixture.sessions.open([fixture.key])
    fixture.sessions.open([])
    with pytest.raises(RuntimeError, match="2 sessions"):
        fixture.sessions.open([])
    fixture.sessions.close(first.session_id)
    fixture.sessions.open([])


def test_a_refused_session_binds_nothing() -> None:
    fixture = Fixture(limit=1)
    open_one = fixture.sessions.open([])
    with pytest.raises(RuntimeError):
        fixture.sessions.open([fixture.key])
    fixture.sessions.close(open_one.session_id)
    with pytest.raises(KeyError):
        fixture.sessions.open([fixture.key, bytes(40)])
    fixture.replace_weight()


def test_claiming_works_once() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    assert fixture.sessions.claim(session.session_id) is session
    assert fixture.sessions.claim(session.session_id) is None
    assert fixture.sessions.claim(bytes(16)) is None
    assert fixture.sessions.claim(b"") is None
    fixture.sessions.close(session.session_id)
    assert fixture.sessions.claim(session.session_id) is None


def test_of_many_claims_at_once_one_wins() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    barrier = threading.Barrier(8)
    won: list[bool] = []

    def claim() -> None:
        barrier.wait()
        won.append(fixture.sessions.claim(session.session_id) is not None)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


def test_unattached_sessions_go_stale_and_attached_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(limit=2)
    now = [1000.0]
    monkeypatch.setattr(session_module.time, "monotonic", lambda: now[0])
    kept, lost = fixture.sessions.open([]), fixture.sessions.open([fixture.key])
    kept.opened = lost.opened = now[0]
    fixture.sessions.claim(kept.session_id)
    now[0] += 59.0
    with pytest.raises(RuntimeError):
        fixture.sessions.open([])
    now[0] += 2.0
    fixture.sessions.open([])
    assert fixture.sessions.claim(lost.session_id) is None
    with pytest.raises(RuntimeError):
        fixture.sessions.open([])
    # The stale session's binding went with it.
    fixture.replace_weight()


def test_closing_releases_the_weights_once() -> None:
    fixture = Fixture()
    one, two = fixture.sessions.open([fixture.key]), fixture.sessions.open([fixture.key])
    for _ in range(3):
        fixture.sessions.close(one.session_id)
    fixture.sessions.close(bytes(16))
    with pytest.raises(UploadError):
        fixture.replace_weight()
    fixture.sessions.close(two.session_id)
    fixture.replace_weight()


def test_execution() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    operand = np.arange(8).reshape(2, 4).astype(np.float16)
    result = np.empty((2, 6), np.float32)
    answer = fixture.sessions.execute(session, header(), operand, result)
    assert answer.status == Status.OK
    assert answer.compute_ns > 0
    np.testing.assert_array_equal(result, operand.astype(np.float32) @ fixture.weight.values.T)


def test_an_engine_failure_is_answered_and_the_session_lives_on() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    operand, result = np.ones((2, 4), np.float16), np.empty((2, 6), np.float32)
    fixture.engine.failing = True
    assert fixture.sessions.execute(session, header(), operand, result).status == Status.ENGINE_FAILED
    fixture.engine.failing = False
    assert fixture.sessions.execute(session, header(), operand, result).status == Status.OK


def test_a_closed_session_cannot_use_weights_that_may_be_gone() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    fixture.sessions.close(session.session_id)
    fixture.replace_weight()
    operand, result = np.ones((2, 4), np.float16), np.empty((2, 6), np.float32)
    assert fixture.sessions.execute(session, header(), operand, result).status == Status.BAD_REQUEST


def test_headers_must_fit_the_session() -> None:
    fixture = Fixture()
    session = fixture.sessions.open([fixture.key])
    assert fits(session, header())
    assert fits(session, header(rows=1000))
    for change in ({"weight_id": 1}, {"weight_id": 2**32 - 1}, {"d_in": 5}, {"d_out": 4}):
        assert not fits(session, header(**change))
    assert not fits(session, header(d_in=6, d_out=4))
    assert not fits(session, header(status=Status.BAD_REQUEST))
    assert not fits(fixture.sessions.open([]), header())


@pytest.mark.parametrize("bits", [8, 16])
def test_the_kind_must_fit_the_weight(bits: int) -> None:
    fixture = Fixture()
    weight = integer_weight(6, 4, bits=bits)
    store, engine = WeightStore(fixture.engine, EngineLock(), capacity=48), fixture.engine
    store.add(weight.digest, 4, 6, weight.format, [weight.data])
    sessions = Sessions(engine, store, EngineLock(), limit=1)
    session = sessions.open([weight_key(weight.digest, 4, 6, weight.format)])
    assert fits(session, header(kind=OperandKind.WORDS))
    assert not fits(session, header())
    assert not fits(fixture.sessions.open([fixture.key]), header(kind=OperandKind.WORDS))
    operand = np.arange(8, dtype=np.uint32).reshape(2, 4) - np.uint32(3)
    result = np.empty((2, 6), np.uint32)
    answer = sessions.execute(session, header(kind=OperandKind.WORDS), operand, result)
    assert (answer.status, answer.kind) == (Status.OK, OperandKind.WORDS)
    np.testing.assert_array_equal(result, operand @ weight.values.astype(np.uint32).T)
