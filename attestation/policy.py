"""Is genuine evidence acceptable? Every expectation is explicit, and all mismatches come together."""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, Literal, TypeAlias

from attestation.certificates import AMD_ROOTS, TrustRoots
from attestation.errors import (
    ChannelBindingError,
    Fault,
    InvalidPolicyError,
    Mismatch,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.pins import UNPINNED, Pin, PinnedOr
from attestation.report import Product, Report
from attestation.rules import CoreRules, LaunchRules, PlatformRules, Rule, listing
from attestation.statement import MODEL_IDENTITY_SIZE, Statement, parse_digest
from attestation.tcb_floors import bundled_floors
from attestation.verify import GenuineReport

__all__ = [
    "DEFAULT_PROTECTION",
    "DEFAULT_SECURITY_BITS",
    "MASKS",
    "MILAN_REASON",
    "NOTHING_GIVEN",
    "REPORT_DATA_SIZE",
    "REPORT_VERSIONS",
    "SIMULATED_MEASUREMENT",
    "SIMULATED_WARNING",
    "UNPINNED",
    "UNPROTECTED",
    "AnyPolicy",
    "Pin",
    "Policy",
    "UnsafeAllowSimulated",
    "standard_platform",
    "validate",
    "validate_report",
]

MEASUREMENT_SIZE = 48
REPORT_DATA_SIZE = 64

MASKS: Final = frozenset({"gelo-haar", "gelo-hd3", "gelo-dct4", "gelo-auto"})
"""Schemes that hide the operands' values but not their row space, and have no security level."""

UNPROTECTED: Final = frozenset({"plain", "plain-int8"})
"""Schemes that hide nothing from the worker."""

DEFAULT_PROTECTION: Final = MASKS | {"lpn"}
"""Schemes that hide the operands from the worker; with a warning for ``MASKS``, which hide less."""

DEFAULT_SECURITY_BITS: Final = 128
"""The least security level of a scheme that has one."""

REPORT_VERSIONS: Final = frozenset({3, 5})
"""Version 2 does not name the processor, so that its patch levels cannot be judged; 4 is parsed only."""

SIMULATED_MEASUREMENT: Final = hashlib.sha384(b"GELO simulated launch measurement: proves nothing").digest()
"""Launch digest of every simulated guest. No real launch can have it: that would be a preimage."""

SIMULATED_WARNING: Final = (
    "SIMULATED EVIDENCE ACCEPTED: it proves nothing. Anyone, the operator included, can read this traffic."
)

MASKS_WARNING: Final = (
    "keeps the row space of what it hides: a worker that knows the public weights can recover prompts "
    "and answers by testing candidates. Ask the operator for lpn."
)

UNPROTECTED_WARNING: Final = "hides nothing: the worker and its host read prompts and answers."

MILAN_REASON: Final = (
    "Milan has no ciphertext hiding, and the seed of its endorsement keys can be extracted by software "
    "(arXiv 2605.12990), after which its owner can sign any report."
)
"""Why Milan is not in the products a policy should name, and what to weigh before adding it."""

NOTHING_GIVEN: Final = LaunchRules(
    host_data=bytes(32),
    family_id=bytes(16),
    image_id=bytes(16),
    guest_svn=0,
    id_key_digest=bytes(48),
    author_key_digest=bytes(48),
)
"""A launch without host data and without an ID block."""


@cache
def standard_platform() -> PlatformRules:
    """The ``standard`` profile: patched hardware that signs with its own chip's key."""
    return PlatformRules(
        versions=REPORT_VERSIONS,
        minimum_firmware=(1, 55, 0),
        minimum_guest_abi=(0, 0),
        floors=bundled_floors(),
        vlek=None,
        chip_ids=UNPINNED,
        revocation_required=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a client accepts. What is not given here is checked against the strictest common value.

    ``measurements``: launch digests of 48 bytes, at least one. ``products``: at least one; see
    ``MILAN_REASON`` before adding Milan. ``model_identity``: the 32-byte identity of the expected
    model, or UNPINNED. ``service``: the expected service name, or UNPINNED. ``allowed_protection``:
    names of acceptable schemes. ``min_security_bits``: the least level, log2 of the operations of the
    best known attack, that a scheme must state; ``MASKS`` and ``UNPROTECTED`` have none and are
    judged by name alone. ``roots``: trusted ARKs, AMD's by default. ``platform``: rules on the
    machine, the ``standard`` profile by default. ``launch``: rules on host data and ID block, by
    default that there are none. ``extra``: further rules, for instance ``StrictRules``. ``CoreRules``
    always hold besides.

    Raises:
        InvalidPolicyError: an expectation is empty or malformed.
    """

    measurements: frozenset[bytes]
    products: frozenset[Product]
    model_identity: PinnedOr[bytes]
    service: PinnedOr[str]
    allowed_protection: frozenset[str] = DEFAULT_PROTECTION
    min_security_bits: float = DEFAULT_SECURITY_BITS
    roots: TrustRoots = AMD_ROOTS
    platform: Rule = field(default_factory=standard_platform)
    launch: Rule = NOTHING_GIVEN
    extra: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for name in ("measurements", "products", "allowed_protection"):
            if not isinstance(getattr(self, name), frozenset) or not getattr(self, name):
                raise InvalidPolicyError(f"{name} must be a frozenset with at least one element.")
        if any(not isinstance(m, bytes) or len(m) != MEASUREMENT_SIZE for m in self.measurements):
            raise InvalidPolicyError(f"Every measurement must have {MEASUREMENT_SIZE} bytes.")
        if not all(isinstance(product, Product) for product in self.products):
            raise InvalidPolicyError("products must hold Product values.")
        bits = self.min_security_bits
        if type(bits) not in (int, float) or not 0 <= bits < math.inf:
            raise InvalidPolicyError("min_security_bits must be a number, at least 0.")
        if self.model_identity is not UNPINNED and (
            not isinstance(self.model_identity, bytes) or len(self.model_identity) != MODEL_IDENTITY_SIZE
        ):
            raise InvalidPolicyError(f"model_identity must be {MODEL_IDENTITY_SIZE} bytes or UNPINNED.")
        if self.service is not UNPINNED and (not isinstance(self.service, str) or not self.service):
            raise InvalidPolicyError("service must be a name or UNPINNED.")
        if self.roots.unsafe_allow_simulated:
            raise InvalidPolicyError("Simulated roots are accepted by UnsafeAllowSimulated only.")
        if not isinstance(self.extra, tuple) or not all(
            isinstance(rule, Rule) for rule in (self.platform, self.launch, *self.extra)
        ):
            raise InvalidPolicyError("platform, launch and extra must hold rules.")


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
        min_security_bits: float = DEFAULT_SECURITY_BITS,
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
                min_security_bits=min_security_bits,
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

    Returns warnings that must reach the user.

    Raises:
        SimulatedEvidenceRefusedError: the evidence is simulated and the policy does not say so.
        ChannelBindingError: REPORT_DATA is not ``expected_report_data`` (64 bytes).
        PolicyRefusedError: anything else does not match.
        Both of the last list every mismatch.
    """
    rules = _rules_for(genuine, policy)
    binding = _binding_mismatches(genuine.report, expected_report_data)
    others = [*_report_mismatches(genuine, rules), *_statement_mismatches(statement, rules)]
    if binding:
        raise ChannelBindingError([*binding, *others])
    if others:
        raise PolicyRefusedError(others)
    return (*_warnings(genuine), *_protection_warnings(statement))


def validate_report(
    genuine: GenuineReport, *, policy: AnyPolicy, expected_report_data: PinnedOr[bytes]
) -> tuple[str, ...]:
    """Hold a genuine report alone against ``policy``, for an auditor who has no statement.

    The policy's expectations of the statement are not checked. ``expected_report_data`` UNPINNED
    does not check what the report was made for.

    Raises:
        SimulatedEvidenceRefusedError: the evidence is simulated and the policy does not say so.
        PolicyRefusedError: something does not match; every mismatch is listed.
    """
    rules = _rules_for(genuine, policy)
    found = _report_mismatches(genuine, rules)
    if expected_report_data is not UNPINNED:
        found = [*_binding_mismatches(genuine.report, expected_report_data), *found]
    if found:
        raise PolicyRefusedError(found)
    return _warnings(genuine)


def _rules_for(genuine: GenuineReport, policy: AnyPolicy) -> Policy:
    if isinstance(policy, Policy):
        if genuine.simulated:
            raise SimulatedEvidenceRefusedError(
                "The evidence comes from a simulated PSP, not from AMD hardware."
            )
        return policy
    rules = policy.policy
    if genuine.simulated:
        return replace(rules, measurements=frozenset({SIMULATED_MEASUREMENT}), products=frozenset(Product))
    return rules


def _warnings(genuine: GenuineReport) -> tuple[str, ...]:
    if genuine.simulated:
        return (SIMULATED_WARNING,)
    return (f"MILAN ACCEPTED: {MILAN_REASON}",) if genuine.product is Product.MILAN else ()


def _protection_warnings(statement: Statement) -> tuple[str, ...]:
    for names, warning in ((MASKS, MASKS_WARNING), (UNPROTECTED, UNPROTECTED_WARNING)):
        if statement.protection in names:
            return (f"PROTECTION {statement.protection} ACCEPTED: it {warning}",)
    return ()


def _binding_mismatches(report: Report, expected: bytes) -> list[Mismatch]:
    if len(expected) == REPORT_DATA_SIZE and hmac.compare_digest(report.report_data, expected):
        return []
    return [
        Mismatch(
            "report_data",
            f"{expected.hex()[:16]}... (this key, statement, nonce and connection)",
            f"{report.report_data.hex()[:16]}...",
            "The report was made for another key or another connection.",
            Fault.CHANNEL,
        )
    ]


def _report_mismatches(genuine: GenuineReport, rules: Policy) -> list[Mismatch]:
    found = [*CoreRules().mismatches(genuine), *rules.platform.mismatches(genuine)]
    measurement, product = genuine.report.measurement, genuine.product
    if measurement not in rules.measurements:
        found.append(
            Mismatch(
                "measurement",
                f"one of {listing(m.hex() for m in rules.measurements)}",
                measurement.hex(),
                "Other software was launched than the policy knows. Compare with the published digests.",
            )
        )
    if product not in rules.products:
        found.append(
            Mismatch(
                "product",
                f"one of {listing(product.value for product in rules.products)}",
                product.value,
                "The policy does not accept this processor generation."
                + (f" {MILAN_REASON}" if product is Product.MILAN else ""),
                Fault.HOST,
            )
        )
    for rule in (rules.launch, *rules.extra):
        found += rule.mismatches(genuine)
    return found


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
                f"one of {listing(rules.allowed_protection)}",
                statement.protection,
                "The service does not protect the operands as the policy asks.",
            )
        )
    elif statement.protection not in MASKS | UNPROTECTED:
        bits = statement.security_bits
        if bits is None or bits < rules.min_security_bits:
            found.append(
                Mismatch(
                    "security_bits",
                    f"at least {rules.min_security_bits:g}",
                    "not stated" if bits is None else f"{bits:g}",
                    "The scheme's parameters are weaker than the policy asks.",
                )
            )
    return found
