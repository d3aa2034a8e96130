"""The client's TLS and the attested handshake, without sockets.

``TlsChannel`` is pyOpenSSL over memory buffers; ``establish`` is the whole procedure up to a
verdict as a generator that asks for bytes, so that the blocking and the asynchronous transport
run the same code.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator

from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL, crypto

from attestation.errors import AttestationError, EvidenceUnavailableError, KeyRotatedError, NotGenuineError
from attestation.evidence import EXPORTER_LABEL, EXPORTER_SIZE, FRESH_PATH, MAX_EVIDENCE_SIZE, NONCE_SIZE
from attestation.peer import PeerVerifier, VerifiedCertificate
from attestation.verdict import Verdict

MAX_ESTABLISH_BYTES = 512 * 1024
"""What a peer may send before the verdict: certificate and evidence are below 64 KiB each."""

MAX_HEAD_SIZE = 16 * 1024

STATUS_KEY_ROTATED = b"409"
"""How a service says that this connection's key has been rotated out."""

_TLS13 = "TLSv1.3"
# X509_V_OK, _ERR_CERT_NOT_YET_VALID and _ERR_CERT_HAS_EXPIRED (PeerVerifier checks validity by its own
# clock), _ERR_DEPTH_ZERO_SELF_SIGNED_CERT (evidence stands in for an authority).
_ACCEPTED_ERRORS = frozenset({0, 9, 10, 18})
_CHUNK = 65536
_RECORD = 16384


class TlsError(Exception):
    """TLS failed for a reason that is not about evidence. The text is OpenSSL's."""


class TlsChannel:
    """One client connection. Ciphertext goes through ``feed`` and ``drain``."""

    def __init__(self, context: SSL.Context, server_name: str | None) -> None:
        self._connection = SSL.Connection(context, None)
        self._connection.set_app_data(self)
        if server_name is not None:
            self._connection.set_tlsext_host_name(server_name.encode("ascii"))
        self._connection.set_connect_state()
        self._der: bytes | None = None
        self.verified: VerifiedCertificate | None = None
        self.refusal: AttestationError | None = None

    def judge(self, verifier: PeerVerifier, certificate: crypto.X509, error: int, depth: int) -> bool:
        """Decide inside the handshake. OpenSSL may ask several times about one certificate."""
        try:
            if depth != 0:
                raise NotGenuineError("The server certificate is not self-signed.")
            der = certificate.to_cryptography().public_bytes(Encoding.DER)
            if self.verified is None or der != self._der:
                self.verified, self._der = verifier.certificate(der), der
            if error not in _ACCEPTED_ERRORS:
                raise NotGenuineError(f"OpenSSL refuses the server certificate (X509 error {error}).")
        except AttestationError as refusal:
            self.refusal = refusal
            return False
        except ValueError:
            self.refusal = NotGenuineError("The server certificate cannot be read.")
            return False
        return True

    def handshake(self) -> bool:
        """Advance the handshake. True once it is complete, False if it needs bytes from the peer.

        Raises:
            AttestationError: the certificate was refused; the alert for the peer is in ``drain``.
            TlsError: TLS itself failed.
        """
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            if self.refusal is not None:
                raise self.refusal from None
            raise TlsError(_reason(error)) from None
        return True

    def feed(self, data: bytes) -> None:
        """Ciphertext from the peer."""
        if data:
            self._connection.bio_write(data)

    def drain(self) -> bytes:
        """Ciphertext for the peer; empty if there is none."""
        parts = []
        while True:
            try:
                parts.append(self._connection.bio_read(_CHUNK))
            except SSL.WantReadError:
                return b"".join(parts)

    def receive(self, size: int) -> bytes | None:
        """Up to ``size`` bytes of plaintext; empty after close_notify; None if more must be fed."""
        try:
            return self._connection.recv(size)
        except SSL.WantReadError:
            return None
        except SSL.ZeroReturnError:
            return b""
        except SSL.Error as error:
            raise TlsError(_reason(error)) from None

    def send(self, data: bytes | memoryview) -> int:
        """Encrypt at most one record of ``data`` (non-empty). Returns the bytes taken."""
        try:
            return self._connection.send(data[:_RECORD])
        except SSL.Error as error:
            raise TlsError(_reason(error)) from None

    def close_notify(self) -> bytes:
        """The closing alert, to be written before the socket closes."""
        try:
            self._connection.shutdown()
        except SSL.Error:
            return b""  # the handshake never completed or failed: there is nothing to close
        return self.drain()

    @property
    def has_plaintext(self) -> bool:
        """Decrypted bytes wait to be received."""
        return self._connection.pending() > 0

    @property
    def version(self) -> str:
        """Protocol version, as OpenSSL names it."""
        return self._connection.get_protocol_version_name()

    def checked_peer(self) -> VerifiedCertificate:
        """What the handshake verified, once more compared with the certificate in use.

        Raises:
            NotGenuineError: the handshake ended without a verification of this certificate.
        """
        peer = self._connection.get_peer_certificate(as_cryptography=True)
        if (
            self.verified is None
            or peer is None
            or peer.public_bytes(Encoding.DER) != self._der
            or self.version != _TLS13
        ):
            raise NotGenuineError("The TLS handshake ended without verified evidence.")
        return self.verified

    def exporter(self) -> bytes:
        """The RFC 9266 channel binding of this connection, 32 bytes."""
        return self._connection.export_keying_material(EXPORTER_LABEL, EXPORTER_SIZE, b"")


def client_context(verifier: PeerVerifier) -> SSL.Context:
    """TLS 1.3 only, no session resumption, peers judged by ``verifier`` inside the handshake."""

    def judge(connection: SSL.Connection, certificate: crypto.X509, error: int, depth: int, ok: int) -> bool:
        channel = connection.get_app_data()
        return isinstance(channel, TlsChannel) and channel.judge(verifier, certificate, error, depth)

    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.set_alpn_protos([b"http/1.1"])
    context.set_verify(SSL.VERIFY_PEER, judge)
    return context


def establish(channel: TlsChannel, verifier: PeerVerifier, host: str) -> Generator[bytes, bytes, Verdict]:
    """TLS handshake, then fresh evidence, then a verdict.

    Yields bytes to write to the peer (maybe empty) and expects the next bytes read from it.

    Raises:
        AttestationError: the peer is not acceptable.
        TlsError: TLS failed, the peer hung up or sent too much.
    """
    budget = MAX_ESTABLISH_BYTES
    plaintext = bytearray()

    def fed(data: bytes) -> None:
        nonlocal budget
        budget -= len(data)
        if not data or budget < 0:
            raise TlsError("the peer closed the connection" if not data else "the peer sends too much")
        channel.feed(data)

    while not channel.handshake():
        fed((yield channel.drain()))
    verified, exporter = channel.checked_peer(), channel.exporter()
    nonce = secrets.token_bytes(NONCE_SIZE)
    request = (
        f"GET {FRESH_PATH}?nonce={nonce.hex()} HTTP/1.1\r\nHost: {host}\r\nAccept: application/cbor\r\n\r\n"
    )
    channel.send(request.encode("ascii"))
    while (body := _response_body(plaintext)) is None:
        data = channel.receive(_CHUNK)
        if data is None:
            fed((yield channel.drain()))
        elif not data:
            raise TlsError("the peer closed the connection")
        else:
            plaintext += data
    return verifier.fresh(verified, body, nonce=nonce, exporter=exporter, tls_version=channel.version)


def _response_body(received: bytearray) -> bytes | None:
    """The body of one complete HTTP/1.1 200 response with a content length; None while incomplete."""
    end = received.find(b"\r\n\r\n")
    if end < 0 or end > MAX_HEAD_SIZE:
        if len(received) > MAX_HEAD_SIZE:
            raise EvidenceUnavailableError(
                "The answer to the request for fresh evidence has too large a head."
            )
        return None
    status, *lines = bytes(received[:end]).split(b"\r\n")
    if status[9:12] == STATUS_KEY_ROTATED and status.startswith(b"HTTP/1.1 "):
        raise KeyRotatedError("The service cannot vouch for the TLS key of this connection any more.")
    if status != b"HTTP/1.1 200" and not status.startswith(b"HTTP/1.1 200 "):
        code = status[9:12].decode("ascii", "replace") if status[9:12].isdigit() else "not HTTP/1.1"
        raise EvidenceUnavailableError(
            f"The service did not give fresh evidence (status {code}).",
            remedy="Try again later if it limits the rate; otherwise it is not an attested service.",
        )
    headers = [
        (name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)
    ]
    lengths = [value for name, value in headers if name == b"content-length"]
    if (
        len(lengths) != 1
        or not lengths[0].isdigit()
        or any(name == b"transfer-encoding" for name, _ in headers)
    ):
        raise EvidenceUnavailableError("The answer with fresh evidence must have one content length.")
    length = int(lengths[0][:9])
    body = bytes(received[end + 4 :])
    if length > MAX_EVIDENCE_SIZE or len(body) > length:
        raise EvidenceUnavailableError("The answer with fresh evidence is longer than allowed or announced.")
    return body if len(body) == length else None


def _reason(error: SSL.Error) -> str:
    """OpenSSL's words for what failed: library constants, never data from the peer."""
    entries = error.args[0] if error.args and isinstance(error.args[0], list) else []
    reasons = [str(entry[-1]) for entry in entries if isinstance(entry, tuple) and entry]
    return ", ".join(reasons) or "the connection ended unexpectedly"
