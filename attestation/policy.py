"""Is genuine evidence acceptable? Every expectation is explicit, and all mismatches come together."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, TypeAlias

from attestation.certificates import AMD_ROOTS, TrustRoots
from attestation.errors import (
    ChannelBindingError,
    InvalidPolicyError,
    Mismatch,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.report import Product, Report, SigningKey
from attestation.statement import MODEL_IDENTITY_SIZE, Statement, parse_digest
from attestation.verify import GenuineReport

MEASUREMENT_SIZE = 48

DEFAULT_PROTECTION: Final = frozenset({"gelo-haar", "gelo-hd3", "gelo-dct4", "gelo-auto", "lpn"})
"""Schemes that hide the operands from the worker. ``plain`` does not and is not here."""

REPORT_VERSIONS: Final = frozenset({3, 5})
"""Version 2 does not name the processor, so that its patch levels cannot be judged; 4 is parsed only."""

SIMULATED_MEASUREMENT: Final = hashlib.sha384(b"GELO simulated launch measurement: proves nothing").digest()
"""Launch digest of every simulated guest. No real launch can have it: that would be a preimage."""

SIMULATED_WARNING: Final = (
    "SIMULATED EVIDENCE ACCEPTED: it proves nothing. Anyone, the operator included, can read this traffic."
)

_POLICY_RESERVED_ONE = 1 << 17
_POLICY_KNOWN_BITS = 26


class Pin(Enum):
    """The one value of UNPINNED, as a type that a checker can tell from a pin."""

    UNPINNED = "unpinned"


UNPINNED: Final = Pin.UNPINNED
"""Written in place of an expectation, it says on purpose: any value will do, but show it to me."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a client accepts.

    ``measurements``: launch digests of 48 bytes, at least one. ``products``: at least one.
    ``model_identity``: the 32-byte identity of the expected model, or UNPINNED. ``service``: the
    expected service name, or UNPINNED. ``allowed_protection``: names of acceptable schemes.
    ``roots``: trusted ARKs, AMD's by default. Always required besides: report version 3 or 5,
    signed with an unmasked VCEK, DEBUG and MIGRATE_MA off, no unknown policy bits, VMPL 0.

    Raises:
        InvalidPolicyError: an expectation is empty or malformed.
    """

    measurements: frozenset[bytes]
    products: frozenset[Product]
    model_identity: bytes | Literal[Pin.UNPINNED]
    service: str | Literal[Pin.UNPINNED]
    allowed_protection: frozenset[str] = DEFAULT_PROTECTION
    roots: TrustRoots = AMD_ROOTS

    def __post_init__(self) -> None:
        for name in ("measurements", "products", "allowed_protection"):
            if not isinstance(getattr(self, name), frozenset) or not getattr(self, name):
                raise InvalidPolicyError(f"{name} must be a frozenset with at least one element.")
        if any(not isinstance(m, bytes) or len(m) != MEASUREMENT_SIZE for m in self.measurements):
            raise InvalidPolicyError(f"Every measurement must have {MEASUREMENT_SIZE} bytes.")
        if not all(isinstance(product, Product) for product in self.products):
            raise InvalidPolicyError("products must hold Product values.")
        if self.model_identity is not UNPINNED and (
            not isinstance(self.model_identity, bytes) or len(self.model_identity) != MODEL_IDENTITY_SIZE
        ):
            raise InvalidPolicyError(f"model_identity must be {MODEL_IDENTITY_SIZE} bytes or UNPINNED.")
        if self.service is not UNPINNED and (not isinstance(self.service, str) or not self.service):
            raise InvalidPolicyError("service must be a name or UNPINNED.")
        if self.roots.unsafe_allow_simulated:
            raise InvalidPolicyError("Simulated roots are accepted by UnsafeAllowSimulated only.")


@dataclass(frozen=True, slots=True)
class UnsafeAllowSimulated:
    """Accept simulated evidence too. For development: it proves nothing about the peer.

    Real evidence is still held to ``policy``. Simulated evidence is held to the same policy,
    with the published ``SIMULATED_MEASUREMENT`` as the only measurement and any product.
    """

    policy: Policy

    @classmethod
    def only(
        cls,
        *,
        model_identity: bytes | str | Literal[Pin.UNPINNED],
        service: str | Literal[Pin.UNPINNED],
        allowed_protection: frozenset[str] = DEFAULT_PROTECTION,
    ) -> UnsafeAllowSimulated:
        """A policy under which nothing but a simulated guest passes."""
        if model_identity is not UNPINNED:
            model_identity = parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model_identity")
        return cls(
            Policy(
                measurements=frozenset({SIMULATED_MEASUREMENT}),
                products=frozenset(Product),
                model_identity=model_identity,
                service=service,
                allowed_protection=allowed_protection,
            )
        )

    @property
    def roots(self) -> TrustRoots:
        """The policy's roots and any root that is labelled simulated."""
        return replace(self.policy.roots, unsafe_allow_simulated=True)


AnyPolicy: TypeAlias = Policy | UnsafeAllowSimulated


def validate(
    genuine: GenuineReport, statement: Statement, *, policy: AnyPolicy, expected_report_data: bytes
) -> tuple[str, ...]:
    """Hold a genuine report and the statement bound to it against ``policy``.

    Returns warnings that must reach the user; empty for evidence from hardware.

    Raises:
        SimulatedEvidenceRefusedError: the evidence is simulated and the policy does not say so.
        ChannelBindingError: REPORT_DATA is not ``expected_report_data`` (64 bytes).
        PolicyRefusedError: anything else does not match.
        Both of the last list every mismatch.
    """
    if isinstance(policy, UnsafeAllowSimulated):
        rules = policy.policy
        if genuine.simulated:
            rules = replace(
                rules, measurements=frozenset({SIMULATED_MEASUREMENT}), products=frozenset(Product)
            )
    elif genuine.simulated:
        raise SimulatedEvidenceRefusedError("The evidence comes from a simulated PSP, not from AMD hardware.")
    else:
        rules = policy
    binding = _binding_mismatches(genuine.report, expected_report_data)
    others = [*_report_mismatches(genuine, rules), *_statement_mismatches(statement, rules)]
    if binding:
        raise ChannelBindingError([*binding, *others])
    if others:
        raise PolicyRefusedError(others)
    return (SIMULATED_WARNING,) if genuine.simulated else ()


def _binding_mismatches(report: Report, expected: bytes) -> list[Mismatch]:
    if hmac.compare_digest(report.report_data, expected):
        return []
    return [
        Mismatch(
            "report_data",
            f"{expected.hex()[:16]}... (this key, statement, nonce and connection)",
            f"{report.report_data.hex()[:16]}...",
            "The report was made for another key or another connection.",
        )
    ]


def _report_mismatches(genuine: GenuineReport, rules: Policy) -> list[Mismatch]:
    report = genuine.report
    unknown_bits = report.policy >> _POLICY_KNOWN_BITS
    checks = (
        (
            report.version in REPORT_VERSIONS,
            "version",
            _listing(map(str, REPORT_VERSIONS)),
            str(report.version),
            "The service's firmware or kernel is too old.",
        ),
        (
            not report.debug,
            "policy.debug",
            "off",
            "on",
            "The host can read this guest's memory. It must be launched without DEBUG.",
        ),
        (
            not report.migration_agent,
            "policy.migrate_ma",
            "off",
            "on",
            "A migration agent could move the guest's secrets. It must be launched without MIGRATE_MA.",
        ),
        (
            bool(report.policy & _POLICY_RESERVED_ONE) and not unknown_bits,
            "policy.reserved",
            "bit 17 set, bits 63:26 clear",
            f"{report.policy:#x}",
            "This client does not know what the policy bits mean; update it.",
        ),
        (
            report.vmpl == 0,
            "vmpl",
            "0",
            str(report.vmpl),
            "The report was made at a less privileged level, where the service does not run.",
        ),
        (
            report.signing_key == SigningKey.VCEK and not report.chip_key_masked,
            "signing_key",
            "VCEK, not masked",
            f"{report.signing_key}{', masked' if report.chip_key_masked else ''}",
            "The platform must sign with its chip's own key.",
        ),
        (any(report.chip_id), "chip_id", "not zero", "zero", "The platform hides which chip it is."),
        (
            report.measurement in rules.measurements,
            "measurement",
            f"one of {_listing(m.hex() for m in rules.measurements)}",
            report.measurement.hex(),
            "Other software was launched than the policy knows. Compare with the published digests.",
        ),
        (
            genuine.product in rules.products,
            "product",
            f"one of {_listing(product.value for product in rules.products)}",
            genuine.product.value,
            "The policy does not accept this processor generation.",
        ),
    )
    return [Mismatch(name, want, got, remedy) for ok, name, want, got, remedy in checks if not ok]


def _statement_mismatches(statement: Statement, rules: Policy) -> list[Mismatch]:
    found = []
    if rules.model_identity is not UNPINNED and not hmac.compare_digest(
        statement.model_identity, rules.model_identity
    ):
        found.append(
            Mismatch(
                "model_identity",
                rules.model_identity.hex(),
                statement.model_identity.hex(),
                "The service runs another model than the policy names.",
            )
        )
    if rules.service is not UNPINNED and statement.service != rules.service:
        found.append(Mismatch("service", rules.service, statement.service, "This is another service."))
    if statement.protection not in rules.allowed_protection:
        found.append(
            Mismatch(
                "protection",
                f"one of {_listing(rules.allowed_protection)}",
                statement.protection,
                "The service does not protect the operands as the policy asks.",
            )
        )
    return found


def _listing(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))
