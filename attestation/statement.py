"""The statement: what the service says it is, bound into REPORT_DATA beside its TLS key."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from attestation import codec
from attestation.errors import AttestationError, InvalidPolicyError, MalformedEvidenceError

ParameterValue: TypeAlias = "int | float | bool | str"

MAX_STATEMENT_SIZE = 4096
MAX_PARAMETERS = 32
MAX_TEXT = 128
MODEL_IDENTITY_SIZE = 32
# The protection parameter that carries a scheme's security level.
SECURITY_BITS = "security_bits"

DOMAIN = b"gelo-ratls/v1"
PURPOSE_CERTIFICATE = b"certificate"
PURPOSE_FRESH = b"fresh"

_KEYS = frozenset({"model_identity", "protection", "protection_parameters", "service", "software_version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Model, protection and software of one service.

    ``model_identity`` is the 32-byte hash of the model, ``protection`` the scheme's name and
    ``protection_parameters`` its parameters. Texts are printable ASCII of at most 128
    characters, so that a verdict can be shown on a terminal.

    Raises:
        InvalidPolicyError: a value is of the wrong type, size or alphabet.
    """

    model_identity: bytes
    protection: str
    protection_parameters: Mapping[str, ParameterValue] = field(hash=False)
    service: str
    software_version: str

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise InvalidPolicyError(f"Invalid statement: {problem}.")
        object.__setattr__(self, "protection_parameters", MappingProxyType(dict(self.protection_parameters)))

    def _problem(self) -> str | None:
        if not isinstance(self.model_identity, bytes) or len(self.model_identity) != MODEL_IDENTITY_SIZE:
            return f"model_identity must have {MODEL_IDENTITY_SIZE} bytes"
        for name in ("protection", "service", "software_version"):
            if not _is_text(getattr(self, name)):
                return f"{name} must be 1 to {MAX_TEXT} printable ASCII characters"
        parameters = self.protection_parameters
        if not isinstance(parameters, Mapping) or len(parameters) > MAX_PARAMETERS:
            return f"protection_parameters must be a map of at most {MAX_PARAMETERS} entries"
        if not all(_is_text(name) and _is_parameter(value) for name, value in parameters.items()):
            return "protection_parameters must map printable names to numbers, booleans or printable texts"
        return None

    @classmethod
    def create(
        cls,
        *,
        model_identity: bytes | str,
        protection: str,
        protection_parameters: Mapping[str, ParameterValue],
        service: str,
        software_version: str,
    ) -> Statement:
        """Like the constructor; ``model_identity`` may also be 64 hexadecimal digits."""
        return cls(
            model_identity=parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model_identity"),
            protection=protection,
            protection_parameters=protection_parameters,
            service=service,
            software_version=software_version,
        )

    @property
    def security_bits(self) -> float | None:
        """The level the scheme states, log2 of the operations of the best known attack; None if none."""
        bits = self.protection_parameters.get(SECURITY_BITS)
        return None if isinstance(bits, bool | str) or bits is None else float(bits)

    def encode(self) -> bytes:
        """Canonical CBOR, the exact bytes that REPORT_DATA covers."""
        return codec.encode(
            {
                "model_identity": self.model_identity,
                "protection": self.protection,
                "protection_parameters": dict(self.protection_parameters),
                "service": self.service,
                "software_version": self.software_version,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Statement:
        """Decode a statement of at most 4096 bytes.

        Raises:
            MalformedEvidenceError: not canonical CBOR, unknown or missing keys, or a wrong value.
        """
        values = codec.decode_map(data, keys=_KEYS, limit=MAX_STATEMENT_SIZE, what="statement")
        try:
            return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every type
        except AttestationError as error:
            raise MalformedEvidenceError(error.message) from None

    def as_dict(self) -> dict[str, object]:
        """The fields as JSON-able values, the model identity in hex."""
        return {
            "model_identity": self.model_identity.hex(),
            "protection": self.protection,
            "protection_parameters": dict(self.protection_parameters),
            "service": self.service,
            "software_version": self.software_version,
        }


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isascii() and value.isprintable()


def _is_parameter(value: object) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_text(value)


def parse_digest(value: bytes | str, size: int, name: str) -> bytes:
    """A digest of ``size`` bytes, given as such or in hex.

    Raises:
        InvalidPolicyError: it has another size or is not hex.
    """
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else bytes(value)
    except ValueError:
        digest = b""
    if len(digest) != size:
        raise InvalidPolicyError(f"{name} must be {size} bytes, or {2 * size} hexadecimal digits.")
    return digest


def report_data(
    *, purpose: bytes, spki: bytes, statement: bytes, nonce: bytes = b"", exporter: bytes = b""
) -> bytes:
    """REPORT_DATA (64 bytes): SHA-512 over the length-prefixed parts, domain tag first.

    ``spki`` is the DER SubjectPublicKeyInfo of the TLS key, ``statement`` the encoded statement.
    ``nonce`` and ``exporter`` (RFC 9266) are empty for the evidence inside the certificate.
    """
    digest = hashlib.sha512()
    for part in (DOMAIN, purpose, spki, statement, nonce, exporter):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
