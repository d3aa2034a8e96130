"""What a client found out about one connection, to show, to save and to attach to an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from attestation.evidence import Evidence
from attestation.report import Tcb
from attestation.statement import Statement

REVOCATION_CHECK = "revocation: no key of the chain is in the ARK's current list"

CHECKS = (
    "certificate: self-signed, P-256, at most 24 hours, valid now",
    "chain: VCEK signed by ASK, ASK by ARK, ARK trusted, all valid now",
    REVOCATION_CHECK,
    "report: ECDSA P-384 signature, patch levels and chip match the VCEK",
    "policy: measurement, product, patch levels, guest policy, platform, VMPL, signing key, launch data",
    "statement: model identity, protection scheme and its level, service",
    "binding: certificate evidence names this TLS key and this statement",
    "binding: fresh evidence names this nonce and this connection's exporter (RFC 9266)",
)
"""What a verdict rests on, in the order it is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The bytes a verdict rests on, for whoever wants to check them again.

    ``certificate``: the server's, in DER, with its evidence inside. ``fresh``: the evidence made for
    this connection, over ``nonce`` and the exporter. The exporter itself is not kept: it identifies
    the connection to its two ends and means nothing to anybody else.
    """

    certificate: bytes = field(repr=False)
    fresh: Evidence = field(repr=False)
    nonce: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A connection that passed every check in ``checks`` at ``time``.

    ``simulated`` True means that nothing was proven; ``warnings`` says so in words. Digests and
    ids are lower-case hex; ``key_sha256`` is over the DER SubjectPublicKeyInfo of the TLS key.
    ``revocation_expires`` is None if no revocation list came with the evidence.
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
    proof: Proof = field(repr=False)
    revocation_expires: datetime | None
    warnings: tuple[str, ...] = ()

    @property
    def checks(self) -> tuple[str, ...]:
        """What was checked. Revocation is among it if the service sent a list."""
        return tuple(c for c in CHECKS if c != REVOCATION_CHECK or self.revocation_expires is not None)

    @property
    def model_identity(self) -> str:
        """The 32-byte identity of the model the service runs, in hex."""
        return self.statement.model_identity.hex()

    @property
    def protection(self) -> str:
        """Name of the protection scheme."""
        return self.statement.protection

    @property
    def security_bits(self) -> float | None:
        """The level of the protection scheme; None if it has none."""
        return self.statement.security_bits

    @property
    def protection_shown(self) -> str:
        """The scheme and its level, for people."""
        bits = self.security_bits
        return self.protection if bits is None else f"{self.protection} ({bits:.1f} bits)"

    def checked(self) -> tuple[tuple[str, str], ...]:
        """Each of ``checks`` with the value that passed it."""
        revocation = self.revocation_expires
        tcb = ", ".join(f"{part} {level}" for part, level in self.reported_tcb.as_dict().items())
        model = f"{self.model_identity} ({'as pinned' if self.model_pinned else 'not pinned'})"
        service = f"{self.statement.service} ({'as pinned' if self.service_pinned else 'not pinned'})"
        values = (
            f"key {self.key_sha256}, until {self.certificate_expires.isoformat()}",
            f"root {self.root_sha256}{' (SIMULATED)' if self.simulated else ''}",
            *([] if revocation is None else [f"list valid until {revocation.isoformat()}"]),
            f"version {self.report_version}, {self.product}, {tcb}, chip {self.chip_id[:16]}…",
            f"measurement {self.measurement}, firmware {self.firmware}",
            f"model {model}, protection {self.protection_shown}, service {service}",
            f"REPORT_DATA over key {self.key_sha256[:16]}… and statement",
            f"nonce {self.proof.nonce.hex()[:16]}…, {self.tls_version}",
        )
        return tuple(zip(self.checks, values, strict=True))

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
            "revocation_expires": None
            if self.revocation_expires is None
            else self.revocation_expires.isoformat(),
            "checks": list(self.checks),
            "warnings": list(self.warnings),
        }
