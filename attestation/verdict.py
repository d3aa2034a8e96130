"""What a client found out about one connection, to show, to save and to attach to an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from attestation.report import Tcb
from attestation.statement import Statement

CHECKS = (
    "certificate: self-signed, P-256, at most 24 hours, valid now",
    "chain: VCEK signed by ASK, ASK by ARK, ARK trusted, all valid now",
    "report: ECDSA P-384 signature, patch levels and chip match the VCEK",
    "policy: measurement, product, debug, migration, VMPL, signing key",
    "statement: model identity, protection scheme, service",
    "binding: certificate evidence names this TLS key and this statement",
    "binding: fresh evidence names this nonce and this connection's exporter (RFC 9266)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A connection that passed every check in ``checks`` at ``time``.

    ``simulated`` True means that nothing was proven; ``warnings`` says so in words. Digests and
    ids are lower-case hex; ``key_sha256`` is over the DER SubjectPublicKeyInfo of the TLS key.
    ``model_pinned`` and ``service_pinned`` tell whether the policy expected these values or
    merely recorded them.
    """

    simulated: bool
    product: str
    report_version: int
    measurement: str
    chip_id: str
    reported_tcb: Tcb
    firmware: str
    root_sha256: str
    statement: Statement
    model_pinned: bool
    service_pinned: bool
    tls_version: str
    key_sha256: str
    certificate_expires: datetime
    fresh_evidence: bool
    time: datetime
    checks: tuple[str, ...] = CHECKS
    warnings: tuple[str, ...] = ()

    @property
    def model_identity(self) -> str:
        """The 32-byte identity of the model the service runs, in hex."""
        return self.statement.model_identity.hex()

    @property
    def protection(self) -> str:
        """Name of the protection scheme."""
        return self.statement.protection

    def as_dict(self) -> Mapping[str, object]:
        """The verdict as JSON-able values."""
        return {
            "simulated": self.simulated,
            "product": self.product,
            "report_version": self.report_version,
            "measurement": self.measurement,
            "chip_id": self.chip_id,
            "reported_tcb": self.reported_tcb.as_dict(),
            "firmware": self.firmware,
            "root_sha256": self.root_sha256,
            **self.statement.as_dict(),
            "model_pinned": self.model_pinned,
            "service_pinned": self.service_pinned,
            "tls_version": self.tls_version,
            "key_sha256": self.key_sha256,
            "certificate_expires": self.certificate_expires.isoformat(),
            "fresh_evidence": self.fresh_evidence,
            "time": self.time.isoformat(),
            "checks": list(self.checks),
            "warnings": list(self.warnings),
        }
