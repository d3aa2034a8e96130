"""TLS for uvicorn, ended inside the asyncio protocol.

The standard library's TLS neither takes a key that exists in memory only nor gives out the RFC
9266 exporter. Here pyOpenSSL runs over memory buffers between uvicorn's transport and its HTTP
protocol, so that the application finds in its scope:

* ``scope["extensions"]["ratls.exporter"]``: 32 bytes that only the two ends of this TLS
  connection know (label ``EXPORTER-Channel-Binding``, empty context);
* ``scope["extensions"]["ratls.spki"]``: the DER public key that this connection was made with.

Use: ``uvicorn.Config(app, http=ratls_protocol(identity))``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterable
from typing import Any, cast

from OpenSSL import SSL
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from attestation.errors import AttestationError
from attestation.evidence import EXPORTER_LABEL, EXPORTER_SIZE
from attestation.ratls import ServerIdentity

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds from accept to the first complete request head. Bounds what a silent client can hold."""

CLOSE_TIMEOUT = 30.0
"""Seconds that a closing connection may take to drain what was written to it."""

_RECORD = 16384  # plaintext of one TLS record
_CHUNK = 65536


def ratls_protocol(
    identity: ServerIdentity,
    *,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    base: type[H11Protocol] | type[HttpToolsProtocol] = H11Protocol,
) -> type[asyncio.Protocol]:
    """A protocol class for ``uvicorn.Config(http=...)`` that serves HTTP/1.1 over RA-TLS.

    ``base`` is the HTTP protocol underneath. h11 is the default because it bounds the size of a
    request head, which httptools does not. WebSockets are not served.
    """

    class RaTlsProtocol(_RaTlsProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            http = base(config, server_state, app_state, _loop)
            super().__init__(http, identity, handshake_timeout, server_state)

    return RaTlsProtocol


class _RaTlsProtocol(asyncio.Protocol):
    """One connection: ciphertext of the raw transport on one side, an HTTP protocol on the other."""

    def __init__(
        self,
        http: H11Protocol | HttpToolsProtocol,
        identity: ServerIdentity,
        handshake_timeout: float,
        server_state: ServerState,
    ) -> None:
        self._http = http
        self._identity = identity
        self._timeout = handshake_timeout
        self._server_state = server_state
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing_timer: asyncio.TimerHandle | None = None
        self._raw: asyncio.Transport | None = None
        self._tls: SSL.Connection | None = None
        self._established = False
        self._reading_paused = False
        self.closing = False
        http.ws_protocol_class = None
        http.app = self._with_extensions(http.app)

    def _with_extensions(self, app: ASGI3Application) -> ASGI3Application:
        async def wrapped(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            self._cancel_timer()
            if scope["type"] == "http":
                extensions = cast("dict[str, object]", scope.setdefault("extensions", {}))
                extensions["ratls.exporter"] = self._exporter
                extensions["ratls.spki"] = self._spki
            await app(scope, receive, send)

        return wrapped

    # asyncio.Protocol, called by the raw transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does so only for listeners it made itself; without it every token may wait 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            credential = self._identity.credential()
        except AttestationError as error:
            logger.error("Refusing a connection: %s", error)
            self._raw.abort()
            return
        self._spki = credential.spki
        self._tls = SSL.Connection(credential.context, None)
        self._tls.set_accept_state()
        self._timer = self._loop.call_later(self._timeout, self._raw.abort)
        # The HTTP protocol registers itself once it has a transport; until then this object stands in,
        # so that a server that stops also ends connections in the middle of their handshake.
        self._server_state.connections.add(cast(Any, self))

    def data_received(self, data: bytes) -> None:
        if self._tls is not None and not self.closing:
            self._tls.bio_write(data)
            self._pump()

    def eof_received(self) -> bool | None:
        return None  # the transport closes itself, and connection_lost follows

    def pause_writing(self) -> None:
        if self._established:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._established:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._cancel_timer()
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._server_state.connections.discard(cast(Any, self))
        if self._established:
            self._http.connection_lost(exc)

    def shutdown(self) -> None:
        """Called by a stopping server while the handshake is in progress."""
        self.abort()

    # The TLS engine

    def _pump(self) -> None:
        """Move everything that can move: handshake, then plaintext to the HTTP protocol."""
        try:
            if not self._established:
                self._tls_connection.do_handshake()
                self._on_established()
            while not self._reading_paused and not self.closing:
                self._http.data_received(self._tls_connection.recv(_CHUNK))
        except SSL.WantReadError:
            pass
        except SSL.ZeroReturnError:
            self.close()
        except SSL.Error:
            # Not TLS, TLS 1.2, or a record that was tampered with. Nothing useful can be said to
            # such a peer beyond the alert that OpenSSL has prepared.
            self._flush()
            self.abort()
        self._flush()

    def _on_established(self) -> None:
        tls = self._tls_connection
        self._exporter = tls.export_keying_material(EXPORTER_LABEL, EXPORTER_SIZE, b"")
        self._established = True
        self._server_state.connections.discard(cast(Any, self))
        self._http.connection_made(_TlsTransport(self))

    @property
    def _tls_connection(self) -> SSL.Connection:
        if self._tls is None:
            raise RuntimeError("The connection has not been made.")
        return self._tls

    @property
    def raw(self) -> asyncio.Transport:
        """The transport below TLS."""
        if self._raw is None:
            raise RuntimeError("The connection has not been made.")
        return self._raw

    def _flush(self) -> None:
        """Hand ciphertext to the raw transport, whose buffer limits apply."""
        while not self.raw.is_closing():
            try:
                self.raw.write(self._tls_connection.bio_read(_CHUNK))
            except SSL.WantReadError:
                return

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Called by _TlsTransport on behalf of the HTTP protocol

    def write(self, data: bytes) -> None:
        if self.closing:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls_connection.send(view[:_RECORD]) :]
                self._flush()
        except SSL.Error:
            self.abort()

    def close(self) -> None:
        if self.closing:
            return
        self.closing = True
        with contextlib.suppress(SSL.Error):  # a peer that is gone has its socket closed all the same
            self._tls_connection.shutdown()
        self._flush()
        self.raw.close()
        self._closing_timer = self._loop.call_later(CLOSE_TIMEOUT, self.raw.abort)

    def abort(self) -> None:
        self.closing = True
        self.raw.abort()

    def pause_reading(self) -> None:
        self._reading_paused = True
        if not self.raw.is_closing():
            self.raw.pause_reading()

    def resume_reading(self) -> None:
        self._reading_paused = False
        if not self.raw.is_closing():
            self.raw.resume_reading()
            # Decrypted or undecrypted bytes may wait in OpenSSL although the socket has no more.
            self._loop.call_soon(self._pump)

    def tls_info(self, name: str, default: object) -> object:
        return self._tls_connection.get_context() if name == "sslcontext" else default


class _TlsTransport(asyncio.Transport):
    """What the HTTP protocol writes plaintext to."""

    def __init__(self, protocol: _RaTlsProtocol) -> None:
        super().__init__()
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._protocol.write(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self._protocol.close()

    def abort(self) -> None:
        self._protocol.abort()

    def is_closing(self) -> bool:
        return self._protocol.closing or self._protocol.raw.is_closing()

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._protocol.pause_reading()

    def resume_reading(self) -> None:
        self._protocol.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._protocol.raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._protocol.raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._protocol.tls_info(name, self._protocol.raw.get_extra_info(name, default))
