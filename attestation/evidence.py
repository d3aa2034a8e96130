"""Evidence as it travels, and the interface of what produces it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from attestation import codec
from attestation.certificates import MAX_CERTIFICATE_SIZE
from attestation.errors import BadNonceError, MalformedEvidenceError
from attestation.report import REPORT_SIZE
from attestation.statement import MAX_STATEMENT_SIZE

EVIDENCE_MEDIA_TYPE = "application/vnd.gelo.sev-snp-evidence+cbor"
"""Type of the record in the certificate (a CMW record, draft-ietf-rats-msg-wrap)."""

FRESH_MEDIA_TYPE = "application/cbor"
"""Content type of the answer to GET /attestation."""

FRESH_PATH = "/attestation"

MAX_EVIDENCE_SIZE = 64 * 1024
MAX_CRL_ON_WIRE = 16 * 1024
"""AMD's revocation lists have under 1 KiB; a list must leave room for the rest of the evidence."""

NONCE_SIZE = 32
EXPORTER_SIZE = 32
EXPORTER_LABEL = b"EXPORTER-Channel-Binding"
"""RFC 9266 section 4; the context is empty."""

_PARTS = ("report", "vcek", "ask", "ark")
_OPTIONAL = frozenset({"crl"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """A report of 1184 bytes and its chain, each certificate in DER.

    ``vcek`` holds whichever endorsement certificate signed the report (VCEK or VLEK), ``ask``
    its issuer (ASK or ASVK), ``crl`` the ARK's revocation list in DER, or None where the service
    has none. Nothing is verified yet; whether a list is needed is for the policy to say.
    """

    report: bytes = field(repr=False)
    vcek: bytes = field(repr=False)
    ask: bytes = field(repr=False)
    ark: bytes = field(repr=False)
    crl: bytes | None = field(default=None, repr=False)


class EvidenceProvider(Protocol):
    """Something that can have a report signed: the PSP, or a stand-in for it."""

    def evidence(self, report_data: bytes) -> Evidence:
        """Evidence whose REPORT_DATA is the given 64 bytes. May block for milliseconds.

        Raises:
            EvidenceUnavailableError: no report could be had.
        """
        ...


def encode_record(evidence: Evidence, statement: bytes) -> bytes:
    """The certificate extension's value: CBOR [media type, CBOR map of evidence and statement]."""
    body = codec.encode({**_as_map(evidence), "statement": statement})
    return codec.encode([EVIDENCE_MEDIA_TYPE, body])


def decode_record(data: bytes) -> tuple[Evidence, bytes]:
    """The inverse of ``encode_record``: evidence and the encoded statement.

    Raises:
        MalformedEvidenceError: not such a record, or a part is too large.
    """
    record = codec.decode(data, limit=MAX_EVIDENCE_SIZE, what="evidence record")
    if not isinstance(record, list) or len(record) != 2 or record[0] != EVIDENCE_MEDIA_TYPE:
        raise MalformedEvidenceError("The evidence record is not of a media type that this client knows.")
    body = record[1]
    if not isinstance(body, bytes):
        raise MalformedEvidenceError("The evidence record does not hold bytes.")
    values = codec.decode_map(
        body,
        keys=frozenset({*_PARTS, "statement"}),
        optional=_OPTIONAL,
        limit=MAX_EVIDENCE_SIZE,
        what="evidence",
    )
    return _from_map(values), _part(values, "statement", MAX_STATEMENT_SIZE)


def encode_fresh(evidence: Evidence) -> bytes:
    """The body of an answer to GET /attestation: a CBOR map of report and chain."""
    return codec.encode(_as_map(evidence))


def decode_fresh(data: bytes) -> Evidence:
    """The inverse of ``encode_fresh``.

    Raises:
        MalformedEvidenceError: not such a map, or a part is too large.
    """
    values = codec.decode_map(
        data, keys=frozenset(_PARTS), optional=_OPTIONAL, limit=MAX_EVIDENCE_SIZE, what="fresh evidence"
    )
    return _from_map(values)


def parse_nonce(text: str | None) -> bytes:
    """The 32 bytes of the ``nonce`` query parameter.

    Raises:
        BadNonceError: absent or not 64 hexadecimal digits; an HTTP API answers 400.
    """
    if text is None:
        raise BadNonceError("A fresh-evidence request needs a nonce.")
    if len(text) != 2 * NONCE_SIZE or set(text) - set("0123456789abcdefABCDEF"):
        raise BadNonceError("The nonce is not 64 hexadecimal digits.")
    return bytes.fromhex(text)


def _as_map(evidence: Evidence) -> dict[str, bytes]:
    parts = {name: getattr(evidence, name) for name in _PARTS}
    return parts if evidence.crl is None else {**parts, "crl": evidence.crl}


def _from_map(values: dict[str, codec.Value]) -> Evidence:
    return Evidence(
        report=_part(values, "report", REPORT_SIZE),
        vcek=_part(values, "vcek", MAX_CERTIFICATE_SIZE),
        ask=_part(values, "ask", MAX_CERTIFICATE_SIZE),
        ark=_part(values, "ark", MAX_CERTIFICATE_SIZE),
        crl=_part(values, "crl", MAX_CRL_ON_WIRE) if "crl" in values else None,
    )


def _part(values: dict[str, codec.Value], name: str, limit: int) -> bytes:
    value = values[name]
    if not isinstance(value, bytes):
        raise MalformedEvidenceError(f"The {name} in the evidence is not a byte string.")
    if len(value) > limit:
        raise MalformedEvidenceError(f"The {name} in the evidence has {len(value)} bytes.")
    return value
