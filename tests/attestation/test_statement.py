"""Statements, evidence records, nonces and REPORT_DATA."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation import codec
from attestation.errors import (
    AttestationError,
    BadNonceError,
    InvalidPolicyError,
    MalformedEvidenceError,
)
from attestation.evidence import (
    EVIDENCE_MEDIA_TYPE,
    MAX_CRL_ON_WIRE,
    Evidence,
    decode_fresh,
    decode_record,
    encode_fresh,
    encode_record,
    parse_nonce,
)
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement, report_data

MakeStatement = Callable[..., Statement]


def test_round_trip(statement: MakeStatement) -> None:
    original = statement()
    decoded = Statement.decode(original.encode())
    assert decoded == original
    assert decoded.encode() == original.encode()
    assert decoded.as_dict()["protection_parameters"] == {"shift": 8, "security_bits": 134.5, "exact": True}


@pytest.mark.parametrize(
    ("parameters", "bits"),
    [
        ({"security_bits": 134.5}, 134.5),
        ({"security_bits": 128}, 128.0),
        ({"security_bits": True}, None),
        ({"security_bits": "128"}, None),
        ({}, None),
    ],
)
def test_the_level_is_a_number_or_not_stated(
    statement: MakeStatement, parameters: dict[str, Any], bits: float | None
) -> None:
    assert statement(protection_parameters=parameters).security_bits == bits


def test_the_model_identity_may_be_hex(statement: MakeStatement) -> None:
    values = statement().as_dict()
    assert Statement.create(**values) == statement()  # type: ignore[arg-type]
    with pytest.raises(InvalidPolicyError, match="64 hexadecimal"):
        Statement.create(**{**values, "model_identity": "zz" * 32})  # type: ignore[arg-type]


def test_parameters_are_frozen_and_copied(statement: MakeStatement) -> None:
    parameters = {"shield_rows": 8}
    made = statement(protection_parameters=parameters)
    parameters["shield_rows"] = 0
    assert made.protection_parameters["shield_rows"] == 8
    with pytest.raises(TypeError):
        made.protection_parameters["shield_rows"] = 0  # type: ignore[index]


WRONG = [
    {"model_identity": b"short"},
    {"model_identity": "00" * 32},
    {"protection": ""},
    {"protection": 3},
    {"service": "x" * 129},
    {"service": "bad\x1b[31m"},
    {"software_version": "vérsion"},
    {"protection_parameters": []},
    {"protection_parameters": {"nested": {"a": 1}}},
    {"protection_parameters": {"list": [1]}},
    {"protection_parameters": {"big": 2**64 - 1}},
    {"protection_parameters": {"": 1}},
    {"protection_parameters": {str(n): n for n in range(33)}},
]


@pytest.mark.parametrize("change", WRONG)
def test_wrong_values_are_refused(statement: MakeStatement, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError):
        statement(**change)
    values = codec.decode(statement().encode(), limit=4096, what="statement")
    assert isinstance(values, dict)
    with pytest.raises(MalformedEvidenceError):
        Statement.decode(codec.encode({**values, **change}))


def test_infinite_parameters_are_refused(statement: MakeStatement) -> None:
    with pytest.raises(InvalidPolicyError):
        statement(protection_parameters={"scale": float("inf")})


def test_unknown_and_missing_keys_are_refused(statement: MakeStatement) -> None:
    values = codec.decode(statement().encode(), limit=4096, what="statement")
    assert isinstance(values, dict)
    with pytest.raises(MalformedEvidenceError):
        Statement.decode(codec.encode({**values, "extra": 1}))
    del values["service"]
    with pytest.raises(MalformedEvidenceError):
        Statement.decode(codec.encode(values))


def test_report_data_is_length_prefixed() -> None:
    parts = {"purpose": b"p", "spki": b"key", "statement": b"st", "nonce": b"n", "exporter": b"e"}
    expected = hashlib.sha512()
    for part in (b"gelo-ratls/v1", b"p", b"key", b"st", b"n", b"e"):
        expected.update(len(part).to_bytes(8, "big") + part)
    assert report_data(**parts) == expected.digest()
    assert report_data(**{**parts, "nonce": b"ne", "exporter": b""}) != expected.digest()


@pytest.mark.parametrize(
    "text", [None, "", "00" * 31, "00" * 33, "0x" + "00" * 31, "g" * 64, "٠" * 64, " " * 64]
)
def test_bad_nonces_are_refused(text: str | None) -> None:
    with pytest.raises(BadNonceError):
        parse_nonce(text)


def test_nonces_are_hex() -> None:
    assert parse_nonce("aB" * 32) == b"\xab" * 32


def test_records_round_trip(psp: SimulatedPsp, statement: MakeStatement) -> None:
    evidence = psp.evidence(bytes(64))
    encoded = statement().encode()
    assert decode_record(encode_record(evidence, encoded)) == (evidence, encoded)
    assert decode_fresh(encode_fresh(evidence)) == evidence


def test_a_revocation_list_travels_with_the_evidence(psp: SimulatedPsp, statement: MakeStatement) -> None:
    plain = replace(psp.evidence(bytes(64)), crl=None)
    assert b"crl" not in encode_fresh(plain)
    evidence = replace(plain, crl=b"list")
    encoded = statement().encode()
    assert decode_record(encode_record(evidence, encoded)) == (evidence, encoded)
    assert decode_fresh(encode_fresh(evidence)) == evidence
    with pytest.raises(MalformedEvidenceError, match="crl"):
        decode_fresh(encode_fresh(replace(plain, crl=bytes(MAX_CRL_ON_WIRE + 1))))
    values = codec.decode(encode_fresh(evidence), limit=65536, what="test")
    assert isinstance(values, dict)
    for wrong in ({**values, "crl": "text"}, {**values, "extra": b""}):
        with pytest.raises(MalformedEvidenceError):
            decode_fresh(codec.encode(wrong))


def test_oversized_and_mistyped_parts_are_refused(psp: SimulatedPsp) -> None:
    evidence = psp.evidence(bytes(64))
    with pytest.raises(MalformedEvidenceError, match="statement"):
        decode_record(encode_record(evidence, bytes(4097)))
    with pytest.raises(MalformedEvidenceError, match="vcek"):
        decode_fresh(encode_fresh(Evidence(evidence.report, bytes(9000), evidence.ask, evidence.ark)))
    with pytest.raises(MalformedEvidenceError, match="byte string"):
        decode_fresh(codec.encode({"report": "text", "vcek": b"", "ask": b"", "ark": b""}))
    with pytest.raises(MalformedEvidenceError, match="more than"):
        decode_fresh(bytes(70000))


@pytest.mark.parametrize(
    "record",
    [
        ["text/plain", b""],
        [EVIDENCE_MEDIA_TYPE],
        [EVIDENCE_MEDIA_TYPE, b"", 0],
        [EVIDENCE_MEDIA_TYPE, "x"],
        [EVIDENCE_MEDIA_TYPE, b""],
        {},
        7,
    ],
)
def test_other_records_are_refused(record: codec.Encodable) -> None:
    with pytest.raises(MalformedEvidenceError):
        decode_record(codec.encode(record))


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_nothing_unexpected(data: bytes) -> None:
    for decode in (decode_record, decode_fresh, Statement.decode):
        with pytest.raises(AttestationError):
            decode(data)


@given(data=st.data())
def test_mutated_records_raise_nothing_unexpected(
    data: st.DataObject, psp: SimulatedPsp, statement: MakeStatement
) -> None:
    raw = bytearray(encode_record(psp.evidence(bytes(64)), statement().encode()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, encoded = decode_record(bytes(raw[: data.draw(st.integers(len(raw) - 4, len(raw)))]))
        Statement.decode(encoded)
    except AttestationError:
        pass
