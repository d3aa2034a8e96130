"""The verification document: what a client checked on one service, with values and time, as JSON.

It is for people who keep records and for auditors. It carries the certificate and the evidence
themselves, so that ``recheck`` can judge them once more, years later, at the time it names. What
cannot be repeated is the binding of the fresh evidence to the connection: the exporter is known to
the two ends only, so there the document is the client's word.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from attestation.errors import AttestationError, MalformedEvidenceError
from attestation.evidence import MAX_EVIDENCE_SIZE, decode_fresh, encode_fresh
from attestation.peer import MAX_LEAF_SIZE, PeerVerifier, VerifiedCertificate, check_same_guest
from attestation.policy import AnyPolicy
from attestation.verdict import Verdict
from attestation.verify import verify_evidence

FORMAT: Final = "gelo-verification/1"
MAX_DOCUMENT_SIZE = 512 * 1024

Document = dict[str, Any]


def accepted(service: str, verdict: Verdict, *, policy: Mapping[str, object]) -> Document:
    """The document of a service that passed. ``policy`` says in JSON-able words what it was held to."""
    return {
        **_head(service, verdict.time, policy),
        "acceptable": True,
        "simulated": verdict.simulated,
        "warnings": list(verdict.warnings),
        "error": None,
        "checks": [{"check": check, "value": value} for check, value in verdict.checked()],
        "verdict": dict(verdict.as_dict()),
        "proof": {
            "certificate": _base64(verdict.proof.certificate),
            "fresh_evidence": _base64(encode_fresh(verdict.proof.fresh)),
            "nonce": verdict.proof.nonce.hex(),
        },
    }


def refused(
    service: str, error: AttestationError, *, time: datetime, policy: Mapping[str, object]
) -> Document:
    """The document of a service that was refused, or that could not be judged, at ``time``."""
    return {
        **_head(service, time, policy),
        "acceptable": False,
        "error": {
            "code": error.code,
            "message": error.message,
            "remedy": error.remedy,
            "mismatches": [mismatch.as_dict() for mismatch in getattr(error, "mismatches", ())],
        },
    }


def encode(document: Document) -> bytes:
    """The document as UTF-8 JSON with a final newline: the bytes that are saved and hashed."""
    return (json.dumps(document, indent=2) + "\n").encode()


def digest(document: Document) -> str:
    """SHA-256 of the encoded document, in hex."""
    return hashlib.sha256(encode(document)).hexdigest()


def save(path: Path, document: Document) -> None:
    """Write the document; a reader sees the old file or the whole new one.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(document))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def recheck(data: bytes, policy: AnyPolicy) -> VerifiedCertificate:
    """Judge the evidence in a saved document again, under ``policy`` and at the document's own time.

    Repeats everything but the binding of the fresh evidence to the connection.

    Raises:
        MalformedEvidenceError: not a document of an accepted service.
        AttestationError: the evidence does not hold, or ``policy`` refuses it.
    """
    try:
        document = json.loads(data) if len(data) <= MAX_DOCUMENT_SIZE else {}
        if document["format"] != FORMAT or document["acceptable"] is not True:
            raise ValueError
        time = datetime.fromisoformat(document["time"])
        leaf = _bytes(document["proof"]["certificate"], MAX_LEAF_SIZE)
        body = _bytes(document["proof"]["fresh_evidence"], MAX_EVIDENCE_SIZE)
        if time.utcoffset() is None:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise MalformedEvidenceError(
            "This is not the verification document of an accepted service.",
            remedy="Save one with `gelo verify URL --save FILE`.",
        ) from None
    verified = PeerVerifier(policy, clock=lambda: time, max_age=timedelta(0)).certificate(leaf)
    fresh = decode_fresh(body)
    check_same_guest(verified.genuine, verify_evidence(fresh, roots=policy.roots, at=time))
    return verified


def _head(service: str, time: datetime, policy: Mapping[str, object]) -> Document:
    return {
        "format": FORMAT,
        "service": service,
        "time": time.astimezone(UTC).isoformat(),
        "policy": dict(policy),
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: object, limit: int) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * limit:
        raise ValueError
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError from None
