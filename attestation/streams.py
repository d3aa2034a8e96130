"""Attested connections as httpcore streams, blocking and asynchronous.

httpcore connects and then calls ``start_tls`` before its pool may send a request. That call does
the whole of ``tls.establish``, over httpcore's own sockets and with its timeouts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpcore

from attestation.peer import PeerVerifier
from attestation.policy import AnyPolicy
from attestation.tls import TlsChannel, TlsError, client_context, establish
from attestation.verdict import Verdict

MAX_ESTABLISH_SECONDS = 30.0
"""Upper bound for handshake and verification together, whatever the caller's timeout is."""

VERDICT = "attestation"
"""``get_extra_info`` of an attested stream by this name is its verdict."""

_CHUNK = 65536


class Deadline:
    """Seconds left of one operation; None means no limit."""

    def __init__(self, seconds: float | None, error: type[Exception]) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._error = error

    def left(self) -> float | None:
        if self._end is None:
            return None
        if (left := self._end - time.monotonic()) <= 0:
            raise self._error("timed out")
        return left


def _establish_deadline(timeout: float | None) -> Deadline:
    seconds = MAX_ESTABLISH_SECONDS if timeout is None else min(timeout, MAX_ESTABLISH_SECONDS)
    return Deadline(seconds, httpcore.ConnectTimeout)


@contextlib.contextmanager
def _connect_errors() -> Iterator[None]:
    """Failures while connecting, in httpcore's terms. AttestationError passes as it is."""
    try:
        yield
    except TlsError as error:
        raise httpcore.ConnectError(f"TLS: {error}") from error
    except (httpcore.ReadTimeout, httpcore.WriteTimeout) as error:
        raise httpcore.ConnectTimeout("timed out during handshake and attestation") from error
    except (httpcore.ReadError, httpcore.WriteError) as error:
        raise httpcore.ConnectError(str(error) or "the peer closed the connection") from error


class Endpoint:
    """What every connection of one transport shares.

    No connection takes a new request once ``max_age`` has passed since it was verified, or its
    certificate has expired: the pool then makes a new one, which is verified anew.
    """

    def __init__(self, policy: AnyPolicy, clock: Callable[[], datetime], max_age: timedelta) -> None:
        self.verifier = PeerVerifier(policy, clock=clock, max_age=max_age)
        self.max_age = max_age
        self.context = client_context(self.verifier)
        self.verdict: Verdict | None = None

    def start(self, host: str, port: int) -> tuple[TlsChannel, Generator[bytes, bytes, Verdict]]:
        channel = TlsChannel(self.context, None if _is_address(host) else host)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return channel, establish(channel, self.verifier, authority)

    def attested(self, channel: TlsChannel, verdict: Verdict) -> Attested:
        """A connection that was just verified."""
        self.verdict = verdict
        good_for = min(self.max_age, verdict.certificate_expires - verdict.time)
        return Attested(channel, verdict, time.monotonic() + good_for.total_seconds())


@dataclass(frozen=True, slots=True)
class Attested:
    """A verified connection. ``good_until`` is in monotonic seconds."""

    channel: TlsChannel
    verdict: Verdict
    good_until: float


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class TlsStream(httpcore.NetworkStream):
    """An attested connection; also the raw one before ``start_tls``, as httpcore models it."""

    def __init__(self, raw: httpcore.NetworkStream, endpoint: Endpoint, host: str, port: int) -> None:
        self._raw, self._endpoint = raw, endpoint
        self._host, self._port = host, port
        self._attested: Attested | None = None

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """Handshake, fresh evidence, verdict. ``ssl_context`` is not used: the policy decides."""
        deadline = _establish_deadline(timeout)
        channel, steps = self._endpoint.start(self._host, self._port)
        try:
            with _connect_errors():
                verdict = self._run(steps, deadline)
        except BaseException:
            with contextlib.suppress(Exception):
                self._raw.write(channel.drain(), 1.0)  # tells the peer that it was refused
            self._raw.close()
            raise
        self._attested = self._endpoint.attested(channel, verdict)
        return self

    def _run(self, steps: Generator[bytes, bytes, Verdict], deadline: Deadline) -> Verdict:
        try:
            outgoing = next(steps)
            while True:
                self._raw.write(outgoing, deadline.left())
                outgoing = steps.send(self._raw.read(_CHUNK, deadline.left()))
        except StopIteration as done:
            verdict: Verdict = done.value
            return verdict

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = Deadline(timeout, httpcore.ReadTimeout)
        try:
            while (data := self._tls.receive(max_bytes)) is None:
                _feed(self._tls, self._raw.read(_CHUNK, deadline.left()))
        except TlsError as error:
            raise httpcore.ReadError(f"TLS: {error}") from error
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline = Deadline(timeout, httpcore.WriteTimeout)
        view = memoryview(buffer)
        try:
            while view:
                view = view[self._tls.send(view) :]
                self._raw.write(self._tls.drain(), deadline.left())
        except TlsError as error:
            raise httpcore.WriteError(f"TLS: {error}") from error

    def close(self) -> None:
        if self._attested is not None:
            with contextlib.suppress(httpcore.WriteError, httpcore.WriteTimeout):
                self._raw.write(self._attested.channel.close_notify(), 1.0)
        self._raw.close()

    def get_extra_info(self, info: str) -> Any:
        return _extra_info(info, self._raw, self._attested)

    @property
    def _tls(self) -> TlsChannel:
        if self._attested is None:
            raise httpcore.UnsupportedProtocol("only https is served: this connection is not attested")
        return self._attested.channel


class AsyncTlsStream(httpcore.AsyncNetworkStream):
    """The asynchronous twin of ``TlsStream``."""

    def __init__(self, raw: httpcore.AsyncNetworkStream, endpoint: Endpoint, host: str, port: int) -> None:
        self._raw, self._endpoint = raw, endpoint
        self._host, self._port = host, port
        self._attested: Attested | None = None

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Handshake, fresh evidence, verdict. ``ssl_context`` is not used: the policy decides."""
        deadline = _establish_deadline(timeout)
        channel, steps = self._endpoint.start(self._host, self._port)
        try:
            with _connect_errors():
                verdict = await self._run(steps, deadline)
        except BaseException as error:
            if isinstance(error, Exception):  # a cancelled task may not wait any more
                with contextlib.suppress(Exception):
                    await self._raw.write(channel.drain(), 1.0)  # tells the peer that it was refused
            await self._raw.aclose()
            raise
        self._attested = self._endpoint.attested(channel, verdict)
        return self

    async def _run(self, steps: Generator[bytes, bytes, Verdict], deadline: Deadline) -> Verdict:
        try:
            outgoing = next(steps)
            while True:
                await self._raw.write(outgoing, deadline.left())
                outgoing = steps.send(await self._raw.read(_CHUNK, deadline.left()))
        except StopIteration as done:
            verdict: Verdict = done.value
            return verdict

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = Deadline(timeout, httpcore.ReadTimeout)
        try:
            while (data := self._tls.receive(max_bytes)) is None:
                _feed(self._tls, await self._raw.read(_CHUNK, deadline.left()))
        except TlsError as error:
            raise httpcore.ReadError(f"TLS: {error}") from error
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline = Deadline(timeout, httpcore.WriteTimeout)
        view = memoryview(buffer)
        try:
            while view:
                view = view[self._tls.send(view) :]
                await self._raw.write(self._tls.drain(), deadline.left())
        except TlsError as error:
            raise httpcore.WriteError(f"TLS: {error}") from error

    async def aclose(self) -> None:
        if self._attested is not None:
            with contextlib.suppress(httpcore.WriteError, httpcore.WriteTimeout):
                await self._raw.write(self._attested.channel.close_notify(), 1.0)
        await self._raw.aclose()

    def get_extra_info(self, info: str) -> Any:
        return _extra_info(info, self._raw, self._attested)

    @property
    def _tls(self) -> TlsChannel:
        if self._attested is None:
            raise httpcore.UnsupportedProtocol("only https is served: this connection is not attested")
        return self._attested.channel


def _feed(channel: TlsChannel, data: bytes) -> None:
    # The end of the stream without close_notify could be an attacker's cut: never a normal end.
    if not data:
        raise httpcore.ReadError("the connection was cut without a TLS close_notify")
    channel.feed(data)


def _extra_info(
    info: str, raw: httpcore.NetworkStream | httpcore.AsyncNetworkStream, attested: Attested | None
) -> Any:
    if info == "ssl_object":
        return None  # there is none, and so httpcore does not look for HTTP/2
    if info == VERDICT:
        return None if attested is None else attested.verdict
    # An idle connection that is readable has been closed by the peer: httpcore then makes a new one. One
    # whose verdict is too old has to go the same way.
    if (
        info == "is_readable"
        and attested is not None
        and (attested.channel.has_plaintext or time.monotonic() >= attested.good_until)
    ):
        return True
    return raw.get_extra_info(info)
