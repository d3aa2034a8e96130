"""The saved verification document: what it says, and judging it again."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation import document
from attestation.client import verify
from attestation.errors import (
    AttestationError,
    ChannelBindingError,
    MalformedEvidenceError,
    Mismatch,
    NotGenuineError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import decode_fresh, encode_fresh
from attestation.policy import SIMULATED_MEASUREMENT, SIMULATED_WARNING, Policy, UnsafeAllowSimulated
from attestation.report import Product
from attestation.simulated import SimulatedPsp
from attestation.verdict import REVOCATION_CHECK


@pytest.fixture(scope="module")
def made(running: Any, policy: UnsafeAllowSimulated) -> document.Document:
    """The document of the well-behaved service."""
    return document.accepted(running.url, verify(running.url, policy), policy={"source": "test"})


def changed(made: document.Document, change: Callable[[Any], None]) -> bytes:
    copied = copy.deepcopy(made)
    change(copied)
    return document.encode(copied)


def test_it_says_what_was_checked_with_values_and_time(made: document.Document, running: Any) -> None:
    assert made["service"] == running.url
    assert datetime.fromisoformat(made["time"]).utcoffset() == timedelta(0)
    assert made["simulated"] is True
    assert made["warnings"] == [SIMULATED_WARNING]
    values = " ".join(check["value"] for check in made["checks"])
    assert "SIMULATED" in values
    for key in ("measurement", "model_identity", "key_sha256", "protection", "root_sha256", "firmware"):
        assert made["verdict"][key] in values
    assert made["proof"]["nonce"][:16] in values


def test_revocation_is_among_the_checks_if_a_list_was_sent(
    running: Any, policy: UnsafeAllowSimulated
) -> None:
    verdict = verify(running.url, policy)
    without = dict(replace(verdict, revocation_expires=None).checked())
    listed = dict(replace(verdict, revocation_expires=datetime(2026, 12, 1, tzinfo=UTC)).checked())
    assert listed.keys() - without.keys() == {REVOCATION_CHECK}
    assert "2026-12-01" in listed[REVOCATION_CHECK]
    assert listed.items() >= without.items()


def test_it_holds_when_judged_again_also_later(
    made: document.Document, policy: UnsafeAllowSimulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attestation.peer.datetime", None)  # the clock of today is not asked
    assert document.recheck(document.encode(made), policy).statement.service == "gelo"


def test_it_is_judged_under_the_policy_given_now(made: document.Document) -> None:
    strict = Policy(
        measurements=frozenset({SIMULATED_MEASUREMENT}),
        products=frozenset(Product),
        model_identity=bytes(range(32)),
        service="gelo",
    )
    with pytest.raises(SimulatedEvidenceRefusedError):
        document.recheck(document.encode(made), strict)
    other = UnsafeAllowSimulated.only(model_identity=bytes(32), service="gelo")
    with pytest.raises(PolicyRefusedError):
        document.recheck(document.encode(made), other)


def test_altered_evidence_is_refused(made: document.Document, policy: UnsafeAllowSimulated) -> None:
    def flip(name: str, offset: int) -> Callable[[Any], None]:
        def change(copied: Any) -> None:
            raw = bytearray(base64.b64decode(copied["proof"][name]))
            raw[offset] ^= 1
            copied["proof"][name] = base64.b64encode(raw).decode()

        return change

    fresh = base64.b64decode(made["proof"]["fresh_evidence"])
    report = fresh.index(decode_fresh(fresh).report)
    for name, offset in (("certificate", 900), ("certificate", -1), ("fresh_evidence", report + 0x90)):
        with pytest.raises(AttestationError):
            document.recheck(changed(made, flip(name, offset)), policy)


def test_another_time_is_refused(made: document.Document, policy: UnsafeAllowSimulated) -> None:
    def later(copied: Any) -> None:
        copied["time"] = (datetime.fromisoformat(copied["time"]) + timedelta(days=2)).isoformat()

    with pytest.raises(NotGenuineError, match="server certificate is valid"):
        document.recheck(changed(made, later), policy)


def test_fresh_evidence_of_another_guest_is_refused(
    made: document.Document, policy: UnsafeAllowSimulated, psp: SimulatedPsp
) -> None:
    def swap(copied: Any) -> None:
        other = psp.altered(report_id=bytes(32)).evidence(bytes(64))
        copied["proof"]["fresh_evidence"] = base64.b64encode(encode_fresh(other)).decode()

    with pytest.raises(ChannelBindingError, match="report_id"):
        document.recheck(changed(made, swap), policy)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.update(format="gelo-verification/2"),
        lambda made: made.update(acceptable=False),
        lambda made: made.update(acceptable="true"),
        lambda made: made.update(time="yesterday"),
        lambda made: made.update(time="2026-01-01T00:00:00"),  # of which zone?
        lambda made: made.update(time=5),
        lambda made: made.pop("proof"),
        lambda made: made.update(proof=[]),
        lambda made: made["proof"].update(certificate="***"),
        lambda made: made["proof"].update(certificate=7),
        lambda made: made["proof"].update(fresh_evidence="A" * 200_000),
        lambda made: made.update(padding="x" * document.MAX_DOCUMENT_SIZE),
    ],
)
def test_other_documents_are_refused(
    made: document.Document, policy: UnsafeAllowSimulated, change: Callable[[Any], None]
) -> None:
    with pytest.raises(MalformedEvidenceError, match="verification document"):
        document.recheck(changed(made, change), policy)


@given(st.binary(max_size=200) | st.just(b"[" * 100_000) | st.just(b"[]") | st.just(b"null"))
def test_arbitrary_bytes_are_refused(policy: UnsafeAllowSimulated, data: bytes) -> None:
    with pytest.raises(MalformedEvidenceError):
        document.recheck(data, policy)


def test_a_refusal_names_every_mismatch(policy: UnsafeAllowSimulated) -> None:
    error = PolicyRefusedError([Mismatch("vmpl", "0", "1", "Do this."), Mismatch("x", "a", "b", "Do that.")])
    time = datetime.fromisoformat("2026-01-01T12:00:00+02:00")
    made = document.refused("https://x", error, time=time, policy={})
    assert made["time"] == "2026-01-01T10:00:00+00:00"
    assert made["acceptable"] is False
    assert [mismatch["field"] for mismatch in made["error"]["mismatches"]] == ["vmpl", "x"]
    with pytest.raises(MalformedEvidenceError):
        document.recheck(document.encode(made), policy)


def test_saving_replaces_the_file_in_one_step(made: document.Document, tmp_path: Path) -> None:
    path = tmp_path / "verification.json"
    path.write_text("old")
    document.save(path, made)
    assert json.loads(path.read_bytes()) == made
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError):
        document.save(tmp_path / "absent" / "file", made)
