"""The attested end of RA-TLS: a TLS key born in memory, and evidence that names it."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from OpenSSL import SSL

from attestation.errors import (
    AttestationError,
    EvidenceUnavailableError,
    InvalidPolicyError,
    KeyRotatedError,
)
from attestation.evidence import (
    EXPORTER_SIZE,
    MAX_EVIDENCE_SIZE,
    NONCE_SIZE,
    EvidenceProvider,
    encode_fresh,
    encode_record,
)
from attestation.statement import PURPOSE_CERTIFICATE, PURPOSE_FRESH, Statement, report_data

logger = logging.getLogger(__name__)

OID_EVIDENCE = x509.ObjectIdentifier("2.23.133.5.4.9")
"""TCG DICE conceptual message wrapper (DICE Attestation Architecture 1.1, section 6.1.5)."""

MAX_LIFETIME = timedelta(hours=24)

_BACKDATE = timedelta(minutes=5)
"""Certificates start a little in the past, for clients whose clocks are behind."""

_RETRY_ROTATION = timedelta(minutes=1)

_ALPN = b"http/1.1"


@dataclass(frozen=True, slots=True)
class Credential:
    """One TLS key with its certificate. ``spki`` is the DER SubjectPublicKeyInfo of the key.

    The private key exists in this object and in ``context`` only; it is never serialised.
    """

    certificate: x509.Certificate = field(repr=False)
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    spki: bytes = field(repr=False)
    context: SSL.Context = field(repr=False)
    expires: datetime


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="ratls-rotation", daemon=True).start()


class ServerIdentity:
    """Who the service is: a statement, and TLS keys that evidence vouches for.

    A new key and certificate are made at construction and, in the background, whenever half of
    ``lifetime`` (at most 24 hours) has passed; connections that use an older key live on. ``hosts``
    are the DNS names and addresses put into the certificate; clients rely on the evidence instead.
    ``clock`` returns the current time (timezone-aware). ``background`` runs the rotation, by
    default in a thread. Thread-safe.

    Raises:
        EvidenceUnavailableError: ``provider`` gave no evidence.
        InvalidPolicyError: ``lifetime`` is out of range.
    """

    def __init__(
        self,
        provider: EvidenceProvider,
        statement: Statement,
        *,
        lifetime: timedelta = MAX_LIFETIME,
        hosts: Sequence[str] = ("localhost", "127.0.0.1", "::1"),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        background: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        if not 2 * _BACKDATE < lifetime <= MAX_LIFETIME:
            raise InvalidPolicyError("A certificate may live for more than 10 minutes and at most 24 hours.")
        self.statement = statement
        self._provider = provider
        self._statement_bytes = statement.encode()
        self._lifetime, self._hosts, self._clock = lifetime, tuple(hosts), clock
        self._background = background
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._rotating = False
        self._previous: Credential | None = None
        self._current = self._make_credential()
        self._rotate_at = self._clock() + lifetime / 2

    def credential(self) -> Credential:
        """The credential for a new connection.

        Returns at once, also while the next one is being made; it blocks for as long as the PSP
        takes only if nobody connected for so long that the current certificate has expired. A
        rotation that fails is logged and retried a minute later.

        Raises:
            EvidenceUnavailableError: the current certificate has expired and no new one can be made.
        """
        now = self._clock()
        with self._lock:
            current = self._current
            expired = now >= current.expires
            due = not expired and not self._rotating and now >= self._rotate_at
            self._rotating = self._rotating or due
        if expired:
            self._replace(current)
        elif due:
            self._background(lambda: self._rotate(current))
        return self._current

    def _rotate(self, current: Credential) -> None:
        try:
            self._replace(current)
        except AttestationError as error:
            logger.warning("Could not rotate the TLS key (%s); keeping the current one.", error.code)
            self._rotate_at = self._clock() + _RETRY_ROTATION
        finally:
            self._rotating = False

    def _replace(self, current: Credential) -> None:
        """Put a new credential in the place of ``current``, unless somebody has done so."""
        with self._making:
            if self._current is not current:
                return
            made = self._make_credential()
            with self._lock:
                self._previous, self._current = current, made
                self._rotate_at = self._clock() + self._lifetime / 2

    def fresh_evidence(self, nonce: bytes, exporter: bytes, *, spki: bytes | None = None) -> bytes:
        """See the function ``fresh_evidence``."""
        if len(nonce) != NONCE_SIZE or len(exporter) != EXPORTER_SIZE:
            raise EvidenceUnavailableError("Fresh evidence needs a nonce and an exporter of 32 bytes each.")
        own = {c.spki for c in (self._current, self._previous) if c is not None}
        key = self._current.spki if spki is None else spki
        if key not in own:
            raise KeyRotatedError("The key of this connection has been rotated out.")
        data = report_data(
            purpose=PURPOSE_FRESH, spki=key, statement=self._statement_bytes, nonce=nonce, exporter=exporter
        )
        return encode_fresh(self._provider.evidence(data))

    def _make_credential(self) -> Credential:
        key = ec.generate_private_key(ec.SECP256R1())
        spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        evidence = self._provider.evidence(
            report_data(purpose=PURPOSE_CERTIFICATE, spki=spki, statement=self._statement_bytes)
        )
        record = encode_record(evidence, self._statement_bytes)
        if len(record) > MAX_EVIDENCE_SIZE:
            raise EvidenceUnavailableError(f"The evidence has {len(record)} bytes, more than clients accept.")
        certificate = self._make_certificate(key, record)
        logger.info("New TLS key, SHA-256 of its public part: %s", hashlib.sha256(spki).hexdigest())
        return Credential(certificate, key, spki, _context(certificate, key), certificate.not_valid_after_utc)

    def _make_certificate(self, key: ec.EllipticCurvePrivateKey, record: bytes) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "RA-TLS")])
        start = self._clock().replace(microsecond=0) - _BACKDATE
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + self._lifetime)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(h) for h in self._hosts]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.UnrecognizedExtension(OID_EVIDENCE, record), critical=False)
            .sign(key, SHA256())
        )


def fresh_evidence(
    identity: ServerIdentity, nonce: bytes, exporter: bytes, *, spki: bytes | None = None
) -> bytes:
    """The body (canonical CBOR, ``FRESH_MEDIA_TYPE``) of the answer to GET /attestation?nonce=....

    ``nonce``: the client's 32 bytes, from ``evidence.parse_nonce``; a request without a valid
    nonce is answered with 400. ``exporter``: 32 bytes, ``scope["extensions"]["ratls.exporter"]``.
    ``spki``: ``scope["extensions"]["ratls.spki"]``, the key this very connection uses, which
    after a rotation is not the current one; without it the current key is assumed.
    Blocks while the PSP signs, so call it in a worker thread and behind a ``TokenBucket``.

    Raises:
        EvidenceUnavailableError: no evidence could be had.
        KeyRotatedError: the key is no longer this identity's; an HTTP API answers 409.
    """
    return identity.fresh_evidence(nonce, exporter, spki=spki)


def _context(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> SSL.Context:
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    # A resumed session would skip the certificate. Without a cache and without self-contained tickets no
    # session can be resumed; what OpenSSL still announces after the handshake is an id it does not keep.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    context.check_privatekey()
    context.set_alpn_select_callback(
        lambda _, offered: _ALPN if _ALPN in offered else SSL.NO_OVERLAPPING_PROTOCOLS
    )
    return context


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
