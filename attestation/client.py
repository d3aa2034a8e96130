"""RA-TLS for httpx: nothing is sent before the peer is attested.

``RaTlsTransport`` and ``AsyncRaTlsTransport`` verify every new connection while it is being made:
the certificate's evidence inside the TLS handshake, then, on the same connection, fresh evidence
over a nonce and the TLS exporter. Only then may the connection pool send a request. A peer that is
refused raises an ``AttestationError``; network failures are httpx's usual exceptions.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import cast

import httpcore
import httpx

from attestation.errors import InvalidPolicyError
from attestation.policy import AnyPolicy
from attestation.streams import AsyncTlsStream, Endpoint, TlsStream
from attestation.verdict import Verdict

DEFAULT_TIMEOUT = 10.0
DEFAULT_PORT = 443
MAX_CONNECTIONS = 100

_HTTPX_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.PoolTimeout, httpx.PoolTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.UnsupportedProtocol, httpx.UnsupportedProtocol),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
    (httpcore.RemoteProtocolError, httpx.RemoteProtocolError),
)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class RaTlsTransport(httpx.BaseTransport):
    """An httpx transport that talks to attested https services only.

    ``policy`` says what is acceptable, ``clock`` returns the current time (timezone-aware). After
    the first request ``verdict`` holds the verdict on the newest connection. The connect timeout
    of a request covers handshake and verification and is capped at 30 seconds. A proxy from the
    environment is not used.

    Raises (from a request):
        AttestationError: the peer is refused, and no byte of the request was sent.
        httpx.TransportError: the network or TLS failed.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        *,
        clock: Callable[[], datetime] = _utc_now,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._endpoint = Endpoint(policy, clock)
        self._pool = httpcore.ConnectionPool(
            ssl_context=_unused_context(),
            max_connections=max_connections,
            network_backend=_Backend(self._endpoint),
        )

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the connection made last; None before the first."""
        return self._endpoint.verdict

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _httpx_errors():
            response = self._pool.handle_request(_core_request(request))
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(cast("Iterable[bytes]", response.stream)),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class AsyncRaTlsTransport(httpx.AsyncBaseTransport):
    """``RaTlsTransport`` for ``httpx.AsyncClient``, under asyncio or trio."""

    def __init__(
        self,
        policy: AnyPolicy,
        *,
        clock: Callable[[], datetime] = _utc_now,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._endpoint = Endpoint(policy, clock)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=_unused_context(),
            max_connections=max_connections,
            network_backend=_AsyncBackend(self._endpoint),
        )

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the connection made last; None before the first."""
        return self._endpoint.verdict

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _httpx_errors():
            response = await self._pool.handle_async_request(_core_request(request))
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_AsyncBody(cast("AsyncIterator[bytes]", response.stream)),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


def verify(
    url: str,
    policy: AnyPolicy,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    clock: Callable[[], datetime] = _utc_now,
) -> Verdict:
    """Connect to ``url``, judge the service and hang up. ``timeout`` is in seconds.

    Raises:
        AttestationError: the service is refused; the class says why.
        InvalidPolicyError: ``url`` is not an https URL.
        httpx.TransportError: the network or TLS failed.
    """
    target = _https_url(url)
    endpoint = Endpoint(policy, clock)
    host = target.raw_host.decode("ascii")
    with _httpx_errors():
        stream = _Backend(endpoint).connect_tcp(host, target.port or DEFAULT_PORT, timeout, None, ())
        stream.start_tls(_unused_context(), host, timeout).close()
    if endpoint.verdict is None:
        raise RuntimeError("The handshake ended without a verdict.")
    return endpoint.verdict


def connect(url: str, policy: AnyPolicy, timeout: httpx.Timeout | float = DEFAULT_TIMEOUT) -> httpx.Client:
    """An httpx client for the service at ``url``, whose every connection is verified.

    Nothing is connected before the first request. ``timeout`` is in seconds, or httpx's.

    Raises:
        InvalidPolicyError: ``url`` is not an https URL.
    """
    return httpx.Client(base_url=_https_url(url), transport=RaTlsTransport(policy), timeout=timeout)


def _https_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise InvalidPolicyError("The service's URL cannot be read.") from None
    if parsed.scheme != "https" or not parsed.host:
        raise InvalidPolicyError("The service's URL must start with https://.")
    return parsed


def _unused_context() -> ssl.SSLContext:
    # httpcore wants a context and would otherwise load the system's certificate store.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Backend(httpcore.NetworkBackend):
    """httpcore's sockets, with attested TLS on top."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._sockets = endpoint, httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        raw = self._sockets.connect_tcp(host, port, timeout, local_address, socket_options)
        return TlsStream(raw, self._endpoint, host, port)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    """The asynchronous twin of ``_Backend``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._sockets = endpoint, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raw = await self._sockets.connect_tcp(host, port, timeout, local_address, socket_options)
        return AsyncTlsStream(raw, self._endpoint, host, port)


class _Body(httpx.SyncByteStream):
    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        with _httpx_errors():
            yield from self._parts

    def close(self) -> None:
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for part in self._parts:
                yield part

    async def aclose(self) -> None:
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            await close()


def _core_request(request: httpx.Request) -> httpcore.Request:
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions=request.extensions,
    )


@contextlib.contextmanager
def _httpx_errors() -> Iterator[None]:
    """httpcore's exceptions as httpx's; everything else as it is."""
    try:
        yield
    except tuple(core for core, _ in _HTTPX_ERRORS) as error:
        mapped = next(public for core, public in _HTTPX_ERRORS if isinstance(error, core))
        raise mapped(str(error)) from error
