"""PEM or DER to DER, strictly, and without the X.509 parser (RFC 7468)."""

from __future__ import annotations

import binascii
import re

from attestation.errors import MalformedEvidenceError

MAX_PEM_SIZE = 256 * 1024
MAX_BLOCKS = 8
"""A chain has three certificates, four with both ASK and ASVK."""

CERTIFICATE = "CERTIFICATE"
CRL = "X509 CRL"

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,32})-----\s([A-Za-z0-9+/=\s]*?)-----END \1-----")


def read_der(data: bytes, label: str, what: str) -> list[bytes]:
    """The DER objects in ``data``: one if it is DER, every block called ``label`` if it is PEM.

    Text between the blocks is ignored, a block with another label refused. ``what`` names the data
    in messages.

    Raises:
        MalformedEvidenceError: empty, too large, too many blocks, or not PEM as RFC 7468 has it.
    """
    if not data or len(data) > MAX_PEM_SIZE:
        raise MalformedEvidenceError(f"The {what} has {len(data)} bytes.")
    if data[:1] == b"\x30":  # an ASN.1 SEQUENCE
        return [data]
    blocks = list(_BLOCK.finditer(data))
    if not blocks or len(blocks) > MAX_BLOCKS or data.count(b"-----BEGIN ") != len(blocks):
        raise MalformedEvidenceError(
            f"The {what} is neither DER nor PEM with 1 to {MAX_BLOCKS} whole blocks."
        )
    decoded = []
    for block in blocks:
        if block[1] != label.encode():
            raise MalformedEvidenceError(f"The {what} holds something else than a {label}.")
        try:
            decoded.append(binascii.a2b_base64(b"".join(block[2].split()), strict_mode=True))
        except binascii.Error:
            raise MalformedEvidenceError(f"The {what} is not valid base64.") from None
    return decoded
