"""The client's judgement of a peer, without any input or output.

Two steps on one connection: the certificate inside the TLS handshake, then fresh evidence over a
nonce and the connection's exporter. Only the second one shows that the holder of the TLS key is
the attested guest itself and not somebody who stole the key.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from attestation.certificates import Certificate, check_validity, load_certificate
from attestation.errors import ChannelBindingError, Fault, MalformedEvidenceError, Mismatch, NotGenuineError
from attestation.evidence import MAX_EVIDENCE_SIZE, decode_fresh, decode_record
from attestation.policy import UNPINNED, AnyPolicy, Policy, validate
from attestation.ratls import MAX_LIFETIME, OID_EVIDENCE
from attestation.statement import PURPOSE_CERTIFICATE, PURPOSE_FRESH, Statement, report_data
from attestation.verdict import Proof, Verdict
from attestation.verdict_cache import DEFAULT_MAX_AGE, VerdictCache
from attestation.verify import GenuineReport, verify_evidence

logger = logging.getLogger(__name__)

MAX_LEAF_SIZE = MAX_EVIDENCE_SIZE + 4096


@dataclass(frozen=True, slots=True)
class VerifiedCertificate:
    """A server certificate whose evidence is genuine, acceptable and about its own key."""

    der: bytes
    spki: bytes
    statement: Statement
    statement_bytes: bytes
    genuine: GenuineReport
    expires: datetime
    warnings: tuple[str, ...]


class PeerVerifier:
    """Holds peers against one policy. ``clock`` returns the current time (timezone-aware).

    A certificate that passed is not judged again for ``max_age``; fresh evidence always is.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        max_age: timedelta = DEFAULT_MAX_AGE,
    ) -> None:
        self.policy = policy
        self.cache = VerdictCache(max_age=max_age)
        self._clock = clock

    def certificate(self, der: bytes) -> VerifiedCertificate:
        """Judge the certificate that the peer showed in the handshake.

        Raises:
            MalformedEvidenceError: no evidence, or evidence that cannot be parsed.
            NotGenuineError: the certificate or its evidence does not verify.
            SimulatedEvidenceRefusedError, ChannelBindingError, PolicyRefusedError: see ``policy.validate``.
        """
        now = self._clock()
        if known := self.cache.get(der, now):
            return known
        leaf = load_certificate(der, "server", limit=MAX_LEAF_SIZE)
        spki = _check_leaf(leaf, now)
        evidence, statement_bytes = decode_record(_evidence_extension(leaf.x509))
        statement = Statement.decode(statement_bytes)
        genuine = verify_evidence(evidence, roots=self.policy.roots, at=now)
        expected = report_data(purpose=PURPOSE_CERTIFICATE, spki=spki, statement=statement_bytes)
        warnings = validate(genuine, statement, policy=self.policy, expected_report_data=expected)
        for warning in warnings:
            logger.warning(warning)
        verified = VerifiedCertificate(
            der, spki, statement, statement_bytes, genuine, leaf.x509.not_valid_after_utc, warnings
        )
        self.cache.put(der, verified, now)
        return verified

    def fresh(
        self, verified: VerifiedCertificate, body: bytes, *, nonce: bytes, exporter: bytes, tls_version: str
    ) -> Verdict:
        """Judge the answer to GET /attestation and conclude.

        ``nonce`` is what this client drew (32 bytes), ``exporter`` this connection's (32 bytes).

        Raises:
            The errors of ``certificate``; ChannelBindingError also if the evidence comes from
            another guest than the certificate's.
        """
        evidence = decode_fresh(body)
        now = self._clock()
        genuine = verify_evidence(evidence, roots=self.policy.roots, at=now)
        expected = report_data(
            purpose=PURPOSE_FRESH,
            spki=verified.spki,
            statement=verified.statement_bytes,
            nonce=nonce,
            exporter=exporter,
        )
        validate(genuine, verified.statement, policy=self.policy, expected_report_data=expected)
        check_same_guest(verified.genuine, genuine)
        proof = Proof(certificate=verified.der, fresh=evidence, nonce=nonce)
        return self._verdict(verified, genuine, proof, tls_version, now)

    def _verdict(
        self,
        verified: VerifiedCertificate,
        genuine: GenuineReport,
        proof: Proof,
        tls_version: str,
        now: datetime,
    ) -> Verdict:
        report = genuine.report
        rules = self.policy if isinstance(self.policy, Policy) else self.policy.policy
        return Verdict(
            simulated=genuine.simulated,
            product=genuine.product.value,
            report_version=report.version,
            measurement=report.measurement.hex(),
            chip_id=report.chip_id.hex(),
            reported_tcb=genuine.reported_tcb,
            firmware=".".join(map(str, report.current_firmware)),
            root_sha256=genuine.root_sha256,
            statement=verified.statement,
            model_pinned=rules.model_identity is not UNPINNED,
            service_pinned=rules.service is not UNPINNED,
            tls_version=tls_version,
            key_sha256=hashlib.sha256(verified.spki).hexdigest(),
            certificate_expires=verified.expires,
            fresh_evidence=True,
            time=now,
            proof=proof,
            revocation_expires=None if genuine.revocation is None else genuine.revocation.expires,
            warnings=verified.warnings,
        )


def _check_leaf(leaf: Certificate, now: datetime) -> bytes:
    """The certificate must be self-signed, of P-256, short-lived and valid. Returns its SPKI."""
    check_validity(leaf, now)
    certificate = leaf.x509
    if certificate.not_valid_after_utc - certificate.not_valid_before_utc > MAX_LIFETIME:
        raise NotGenuineError("The server certificate lives longer than 24 hours.")
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise NotGenuineError("The server's key is not on P-256.")
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, ValueError, TypeError):
        raise NotGenuineError("The server certificate is not signed with its own key.") from None
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _evidence_extension(certificate: x509.Certificate) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(OID_EVIDENCE).value
    except x509.ExtensionNotFound:
        raise MalformedEvidenceError(
            "The server certificate carries no attestation evidence.",
            remedy="This is not an attested service, or something terminates TLS in front of it.",
        ) from None
    if not isinstance(value, x509.UnrecognizedExtension):
        raise MalformedEvidenceError("The evidence extension is not raw bytes.")
    return value.value


def check_same_guest(first: GenuineReport, second: GenuineReport) -> None:
    """Raises ChannelBindingError unless both reports come from one guest on one chip."""
    remedy = "The answer was signed for another machine than the certificate."
    mismatches = [
        Mismatch(
            name, getattr(first.report, name).hex(), getattr(second.report, name).hex(), remedy, Fault.CHANNEL
        )
        for name in ("chip_id", "report_id", "measurement")
        if getattr(first.report, name) != getattr(second.report, name)
    ]
    if mismatches:
        raise ChannelBindingError(mismatches)
