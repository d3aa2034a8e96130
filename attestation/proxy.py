"""A local plain-HTTP port that leads to one attested service: the ASGI application of `gelo proxy`.

Any HTTP client on this machine can then talk to a confidential service, while this process does what
the client cannot: it verifies every connection before a byte of a request is sent over it. Requests
and responses are streamed, whatever their path.

The port is for programs of this machine, so the application also keeps web pages out, which a browser
would happily let send requests to loopback: the Host must be the port's own address (against DNS
rebinding), and a request that says it comes from a web page (Origin, or Sec-Fetch-Site) is refused
unless that origin is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx

from attestation import document
from attestation.client import AsyncRaTlsTransport, https_url, response_verdict
from attestation.errors import AttestationError
from attestation.policy import AnyPolicy
from attestation.verdict import Verdict

logger = logging.getLogger(__name__)

DOCUMENT_PATH = "/.well-known/gelo-verification"
"""The newest verification document; with ``/<SHA-256>`` the one that a response named. The one path
that does not lead to the service."""

DOCUMENT_HEADER = b"x-gelo-verification"
"""SHA-256 of the verification document of the connection that a response came over."""

WARNING_HEADER = b"x-gelo-warning"

MAX_DOCUMENTS = 64

TIMEOUTS = {"connect": 15.0, "read": 600.0, "write": 60.0, "pool": 60.0}
"""Seconds. ``read`` covers the time to a first token behind a long queue."""

# RFC 9110 section 7.6.1: fields about one connection, which a proxy MUST NOT forward.
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding",
        b"upgrade", b"proxy-authenticate", b"proxy-authorization",
    }
)  # fmt: skip
_REQUEST_DROPPED = _HOP_BY_HOP | {b"host", b"expect", b"origin"}
_RESPONSE_DROPPED = _HOP_BY_HOP | {DOCUMENT_HEADER, WARNING_HEADER}
_REFUSED_METHODS = frozenset({"CONNECT", "TRACE"})
_OWN_SITE = frozenset({b"none", b"same-origin"})

Headers = Sequence[tuple[bytes, bytes]]
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


class LocalProxy:
    """Forwards each request to ``service`` over a connection that passed ``policy``.

    ``service`` is an https URL; its path comes before the request's. ``hosts`` are the accepted Host
    values, in lower case and with the port; ``origins`` the web origins that may call. ``source``
    describes the policy in verification documents. ``on_document`` is called with each new one, in the
    event loop.

    Raises:
        InvalidPolicyError: ``service`` is not an https URL.
    """

    def __init__(
        self,
        service: str,
        policy: AnyPolicy,
        *,
        hosts: Iterable[str],
        origins: Iterable[str] = (),
        source: Mapping[str, object],
        on_document: Callable[[document.Document, Verdict], None] = lambda _document, _verdict: None,
    ) -> None:
        self._service = service
        self._target = https_url(service)
        self._prefix = self._target.raw_path.partition(b"?")[0].rstrip(b"/")
        self._transport = AsyncRaTlsTransport(policy)
        self._hosts = frozenset(host.encode("ascii") for host in hosts)
        self._origins = frozenset(origin.encode("ascii") for origin in origins)
        self._source, self._on_document = source, on_document
        self._digests: OrderedDict[Verdict, str] = OrderedDict()
        self._documents: OrderedDict[str, bytes] = OrderedDict()

    async def aclose(self) -> None:
        """Close the connections to the service."""
        await self._transport.aclose()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("Only HTTP is served: run the server without lifespan and WebSockets.")
        refusal = self._refusal(scope)
        if refusal is not None:
            status, code, message = refusal
            await _respond(send, status, _error(code, message))
            return
        origin = _one(scope["headers"], b"origin")
        cors = [] if origin is None else [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if origin is not None and _one(scope["headers"], b"access-control-request-method") is not None:
            await _respond(send, 204, b"", [*cors, *_preflight(scope["headers"])])
        elif scope["path"] == DOCUMENT_PATH or scope["path"].startswith(DOCUMENT_PATH + "/"):
            await self._send_document(scope, send, cors)
        else:
            await self._forward(scope, receive, send, cors)

    def _refusal(self, scope: Any) -> tuple[int, str, str] | None:
        """Why this request must not be forwarded: status, code, message."""
        headers = scope["headers"]
        host = _one(headers, b"host")
        if host is None or host.lower() not in self._hosts:
            return 421, "host-refused", "The Host of the request is not this proxy's own address."
        origins = [value for name, value in headers if name == b"origin"]
        if any(origin not in self._origins for origin in origins) or len(origins) > 1:
            return 403, "origin-refused", "Web pages may not use this proxy; see --allow-origin."
        if not origins and not set(_all(headers, b"sec-fetch-site")) <= _OWN_SITE:
            return 403, "origin-refused", "Web pages may not use this proxy; see --allow-origin."
        if not _raw_path(scope).startswith(b"/"):  # RFC 9112 section 3.2.2: absolute-form names another host
            return 400, "target-refused", "The target of the request must be a path."
        if scope["method"] in _REFUSED_METHODS:
            return 405, "method-refused", "This proxy leads to one service and forwards no such request."
        return None

    async def _forward(self, scope: Any, receive: Receive, send: Send, cors: Headers) -> None:
        started = False
        incoming = _Incoming(receive)
        try:
            request = self._request(scope, incoming)
            response = await incoming.watched(self._transport.handle_async_request(request))
            try:
                headers = _forwarded(response.headers.raw, _RESPONSE_DROPPED)
                headers += [*self._attached(response_verdict(response)), *cors]
                await send(
                    {"type": "http.response.start", "status": response.status_code, "headers": headers}
                )
                started = True
                await incoming.watched(_stream(response, send))
            finally:
                with contextlib.suppress(httpx.TransportError):
                    await response.aclose()
        except _ClientGoneError:
            return
        except AttestationError as error:
            logger.error("Refused the service, nothing was sent to it: %s", error)
            await _respond(send, 502, _error(error.code, error.message, error.remedy), cors)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            logger.warning("The service failed: %s.", type(error).__name__)
            if not started:  # else the server cuts the connection, and the client sees the cut
                status = 504 if isinstance(error, httpx.TimeoutException) else 502
                message = f"The service cannot be used ({type(error).__name__})."
                await _respond(send, status, _error("service-unreachable", message), cors)
        finally:
            await incoming.aclose()

    def _request(self, scope: Any, incoming: _Incoming) -> httpx.Request:
        raw_path = self._prefix + _raw_path(scope)
        if scope["query_string"]:
            raw_path += b"?" + scope["query_string"]
        headers = _forwarded(scope["headers"], _REQUEST_DROPPED)
        headers.append((b"host", self._target.netloc))
        chunked = _one(scope["headers"], b"transfer-encoding") is not None
        if chunked:
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers.append((b"transfer-encoding", b"chunked"))
        elif _one(scope["headers"], b"content-length") is None:
            incoming.has_body = False
        return httpx.Request(
            scope["method"],
            self._target.copy_with(raw_path=raw_path),
            headers=headers,
            stream=incoming,
            extensions={"timeout": TIMEOUTS},
        )

    def _attached(self, verdict: Verdict) -> list[tuple[bytes, bytes]]:
        """Headers that tell the local client about the connection's verdict."""
        digest = self._digests.get(verdict)
        if digest is None:
            made = document.accepted(self._service, verdict, policy=self._source)
            digest = document.digest(made)
            self._digests[verdict], self._documents[digest] = digest, document.encode(made)
            for kept in (self._digests, self._documents):
                while len(kept) > MAX_DOCUMENTS:
                    kept.popitem(last=False)
            self._on_document(made, verdict)
        warnings = [(WARNING_HEADER, warning.encode("ascii", "replace")) for warning in verdict.warnings]
        return [(DOCUMENT_HEADER, digest.encode("ascii")), *warnings]

    async def _send_document(self, scope: Any, send: Send, cors: Headers) -> None:
        digest = scope["path"].removeprefix(DOCUMENT_PATH).removeprefix("/")
        if not digest and self._documents:
            digest = next(reversed(self._documents))
        body = self._documents.get(digest)
        if scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, _error("method-refused", "Verification documents can be read."), cors)
        elif body is None:
            message = "There is no such verification document (any more)."
            await _respond(send, 404, _error("document-unknown", message), cors)
        else:
            await _respond(send, 200, body, cors)


class _ClientGoneError(Exception):
    """The local client closed its connection."""


class _Incoming(httpx.AsyncByteStream):
    """The local request's body, read ahead by one chunk, and a watch on the client's presence."""

    def __init__(self, receive: Receive) -> None:
        self.has_body = True
        self._receive = receive
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Returns once the client is gone."""
        done = False
        while (message := await self._receive())["type"] != "http.disconnect":
            if done:
                continue
            if message.get("body"):
                await self._chunks.put(message["body"])
            if not message.get("more_body", False):
                await self._chunks.put(None)
                done = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.has_body:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk

    async def watched(self, work: Any) -> Any:
        """The result of ``work``, which is cancelled if the client leaves.

        Raises:
            _ClientGoneError: it left.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        raise _ClientGoneError

    async def aclose(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


def _raw_path(scope: Any) -> bytes:
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw_path


async def _stream(response: httpx.Response, send: Send) -> None:
    stream = response.stream
    if not isinstance(stream, httpx.AsyncByteStream):
        raise RuntimeError("The transport gave a stream that is not asynchronous.")
    async for part in stream:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    head = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    if status != 204:
        head.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*head, *headers]})
    await send({"type": "http.response.body", "body": body})


def _error(code: str, message: str, remedy: str = "") -> bytes:
    error = {"code": code, "message": message, "type": "gelo-proxy", "remedy": remedy}
    return json.dumps({"error": error}).encode()


def _all(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _one(headers: Headers, name: bytes) -> bytes | None:
    """The value of a field that is there exactly once."""
    values = _all(headers, name)
    return values[0] if len(values) == 1 else None


def _forwarded(headers: Headers, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """End-to-end fields: not ``dropped`` ones, and none that Connection names."""
    named = {
        token.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in dropped | named]


def _preflight(headers: Headers) -> list[tuple[bytes, bytes]]:
    requested = _one(headers, b"access-control-request-headers")
    return [
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        *([(b"access-control-allow-headers", requested)] if requested else []),
        (b"access-control-max-age", b"600"),
    ]
