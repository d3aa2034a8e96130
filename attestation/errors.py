"""Typed errors: what was wrong, a stable code for machines, and what a person should do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    """Who can set a mismatch right."""

    OPERATOR = "the service's operator"
    """Launched the guest: software, launch options, key, identity."""
    HOST = "the owner of the host"
    """Runs the machine: firmware, microcode, platform configuration."""
    CHANNEL = "whoever is on the way"
    """The evidence was made for somebody else."""
    CLIENT = "the policy or this program"
    """The expectation is incomplete or out of date."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One expectation that was not met. All values are printable text."""

    field: str
    expected: str
    got: str
    remedy: str
    fault: Fault = Fault.OPERATOR

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got} (up to {self.fault}). {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """The parts by name, for JSON."""
        return {
            "field": self.field,
            "expected": self.expected,
            "got": self.got,
            "fault": str(self.fault),
            "remedy": self.remedy,
        }


class AttestationError(Exception):
    """Base of every error this package raises on purpose.

    ``code`` is stable and machine-readable; ``remedy`` tells a person what to do next. No
    message carries a key, an exporter value or anything a client sent.
    """

    code: ClassVar[str] = "attestation"
    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = self.default_remedy if remedy is None else remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class MalformedEvidenceError(AttestationError):
    """The bytes are not what the format allows; nothing was decided about them."""

    code = "evidence-malformed"
    default_remedy = "The peer is not a compatible service, or something on the way altered the bytes."


class NotGenuineError(AttestationError):
    """A signature, a chain, a validity period or a certificate extension does not hold."""

    code = "evidence-not-genuine"
    default_remedy = "Do not send data to this service. If it should be genuine, report this to its operator."


class _WithMismatchesError(AttestationError):
    """An error that lists every unmet expectation together."""

    heading: ClassVar[str] = ""

    def __init__(self, mismatches: Iterable[Mismatch], *, remedy: str | None = None) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(f"{self.heading} {' '.join(map(str, self.mismatches))}", remedy=remedy)


class PolicyRefusedError(_WithMismatchesError):
    """The evidence is genuine and the policy does not accept it."""

    code = "policy-refused"
    heading = "The evidence is genuine, the policy refuses it:"


class ChannelBindingError(_WithMismatchesError):
    """The evidence speaks of another key or another connection than this one."""

    code = "channel-binding"
    heading = "The evidence is not bound to this connection:"
    default_remedy = "Somebody may be relaying this connection. Do not send data over it."


class SimulatedEvidenceRefusedError(AttestationError):
    """The evidence comes from the simulated PSP, and nobody asked for that."""

    code = "simulated-refused"
    default_remedy = (
        "Simulated evidence proves nothing. Run the service on SEV-SNP hardware, or, for development "
        "only, wrap the policy in UnsafeAllowSimulated."
    )


class InvalidPolicyError(AttestationError):
    """A policy, statement or identity was built from values that cannot be right."""

    code = "policy-invalid"


class EvidenceUnavailableError(AttestationError):
    """No evidence could be produced or fetched."""

    code = "evidence-unavailable"


class EvidenceBusyError(EvidenceUnavailableError):
    """The platform signs no report right now: too many requests, or the host holds it back."""

    code = "evidence-busy"
    default_remedy = "Try again in a few seconds. If it stays so, the host limits this guest's requests."


class CollateralError(EvidenceUnavailableError):
    """The certificates or the revocation list of this chip could not be had."""

    code = "collateral-unavailable"


class LaunchMeasurementError(AttestationError):
    """The expected launch digest cannot be computed from the given files."""

    code = "launch-measurement"


class KeyRotatedError(EvidenceUnavailableError):
    """The TLS key of this connection is no longer one that the service can vouch for."""

    code = "key-rotated"
    default_remedy = "Open a new connection; it will use the current key."


class BadNonceError(AttestationError):
    """The nonce of a fresh-evidence request is missing or is not 32 bytes in hex."""

    code = "bad-nonce"
    default_remedy = "Call GET /attestation?nonce=<64 hexadecimal digits>, drawn at random for each request."
