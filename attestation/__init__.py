"""Attestation of an AMD SEV-SNP guest and RA-TLS, as a library that stands alone.

Three layers that never mix: ``report`` parses and decides nothing, ``verify`` says that the
bytes are genuine, ``policy`` says whether they are acceptable. Around them: ``statement`` and
``evidence`` (what travels), ``ratls`` and ``server`` (the attested end), ``client`` (the end that
verifies), and ``simulated`` (an evidence provider for machines without SEV-SNP, which proves
nothing and is refused unless asked for by name).
"""

from __future__ import annotations

from attestation.errors import (
    AttestationError,
    BadNonceError,
    ChannelBindingError,
    EvidenceUnavailableError,
    Fault,
    InvalidPolicyError,
    KeyRotatedError,
    MalformedEvidenceError,
    Mismatch,
    NotGenuineError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import Evidence, EvidenceProvider
from attestation.policy import UNPINNED, AnyPolicy, Policy, UnsafeAllowSimulated
from attestation.policy_file import load_policy
from attestation.report import Product, Report
from attestation.rules import AllOf, AnyOf, LaunchRules, PlatformRules, StrictRules, Vlek
from attestation.statement import Statement
from attestation.verdict import Verdict

__all__ = [
    "UNPINNED",
    "AllOf",
    "AnyOf",
    "AnyPolicy",
    "AttestationError",
    "BadNonceError",
    "ChannelBindingError",
    "Evidence",
    "EvidenceProvider",
    "EvidenceUnavailableError",
    "Fault",
    "InvalidPolicyError",
    "KeyRotatedError",
    "LaunchRules",
    "MalformedEvidenceError",
    "Mismatch",
    "NotGenuineError",
    "PlatformRules",
    "Policy",
    "PolicyRefusedError",
    "Product",
    "Report",
    "SimulatedEvidenceRefusedError",
    "Statement",
    "StrictRules",
    "UnsafeAllowSimulated",
    "Verdict",
    "Vlek",
    "load_policy",
]
