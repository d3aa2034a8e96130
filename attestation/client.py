"""RA-TLS for httpx: nothing is sent before the peer is attested.

``RaTlsTransport`` and ``AsyncRaTlsTransport`` verify every new connection while it is being made:
the certificate's evidence inside the TLS handshake, then, on the same connection, fresh evidence
over a nonce and the TLS exporter. Only then may the connection pool send a request. A peer that is
refused raises an ``AttestationError``; network failures are httpx's usual exceptions.

Services change their TLS key about twice a day. A new key is verified like the first one. If the key
is rotated out while a connection is being verified, one more connection is made and verified.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpcore
import httpx

from attestation.errors import InvalidPolicyError, KeyRotatedError
from attestation.policy import AnyPolicy
from attestation.streams import VERDICT, AsyncTlsStream, Deadline, Endpoint, TlsStream
from attestation.verdict import Verdict
from attestation.verdict_cache import DEFAULT_MAX_AGE

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
    the first request ``verdict`` holds the verdict on the newest connection; the verdict on the very
    connection that a response came over is ``response.extensions["attestation"]``. A verdict is good
    for ``max_age``: then an idle connection is replaced by one that is verified anew. The connect
    timeout of a request covers handshake and verification and is capped at 30 seconds. A proxy from
    the environment is not used.

    Raises (from a request):
        AttestationError: the peer is refused, and no byte of the request was sent.
        httpx.TransportError: the network or TLS failed.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        *,
        clock: Callable[[], datetime] = _utc_now,
        max_age: timedelta = DEFAULT_MAX_AGE,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._endpoint = Endpoint(policy, clock, max_age)
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
            try:
                response = self._pool.handle_request(_core_request(request))
            except KeyRotatedError:  # raised before the request was touched
                response = self._pool.handle_request(_core_request(request))
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(cast("Iterable[bytes]", response.stream)),
            extensions=_with_verdict(response.extensions),
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
        max_age: timedelta = DEFAULT_MAX_AGE,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._endpoint = Endpoint(policy, clock, max_age)
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
            try:
                response = await self._pool.handle_async_request(_core_request(request))
            except KeyRotatedError:  # raised before the request was touched
                response = await self._pool.handle_async_request(_core_request(request))
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_AsyncBody(cast("AsyncIterator[bytes]", response.stream)),
            extensions=_with_verdict(response.extensions),
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
    """Connect to ``url``, judge the service and hang up. ``timeout`` is in seconds, for all of it.

    Raises:
        AttestationError: the service is refused; the class says why.
        InvalidPolicyError: ``url`` is not an https URL.
        httpx.TransportError: the network or TLS failed.
    """
    target = https_url(url)
    endpoint = Endpoint(policy, clock, DEFAULT_MAX_AGE)
    host = target.raw_host.decode("ascii")
    deadline = Deadline(timeout, httpcore.ConnectTimeout)
    with _httpx_errors():
        try:
            return _verify_once(endpoint, host, target.port or DEFAULT_PORT, deadline)
        except KeyRotatedError:
            return _verify_once(endpoint, host, target.port or DEFAULT_PORT, deadline)


def _verify_once(endpoint: Endpoint, host: str, port: int, deadline: Deadline) -> Verdict:
    stream = _Backend(endpoint).connect_tcp(host, port, deadline.left(), None, ())
    stream.start_tls(_unused_context(), host, deadline.left()).close()
    verdict = stream.get_extra_info(VERDICT)
    if not isinstance(verdict, Verdict):
        raise RuntimeError("The handshake ended without a verdict.")
    return verdict


def connect(url: str, policy: AnyPolicy, timeout: httpx.Timeout | float = DEFAULT_TIMEOUT) -> httpx.Client:
    """An httpx client for the service at ``url``, whose every connection is verified.

    Nothing is connected before the first request. ``timeout`` is in seconds, or httpx's.

    Raises:
        InvalidPolicyError: ``url`` is not an https URL.
    """
    return httpx.Client(base_url=https_url(url), transport=RaTlsTransport(policy), timeout=timeout)


def connect_async(
    url: str, policy: AnyPolicy, timeout: httpx.Timeout | float = DEFAULT_TIMEOUT
) -> httpx.AsyncClient:
    """``connect`` for asyncio and trio."""
    return httpx.AsyncClient(base_url=https_url(url), transport=AsyncRaTlsTransport(policy), timeout=timeout)


def response_verdict(response: httpx.Response) -> Verdict:
    """The verdict on the connection that ``response`` came over.

    Raises:
        LookupError: the response did not come through a transport of this module.
    """
    verdict = response.extensions.get(VERDICT)
    if not isinstance(verdict, Verdict):
        raise LookupError("The response did not come over an attested connection.")
    return verdict


def https_url(url: str) -> httpx.URL:
    """``url``, parsed.

    Raises:
        InvalidPolicyError: it is not an https URL with a host.
    """
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


def _with_verdict(extensions: Any) -> dict[str, Any]:
    stream = extensions.get("network_stream")
    verdict = None if stream is None else stream.get_extra_info(VERDICT)
    return {**extensions, VERDICT: verdict}


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
