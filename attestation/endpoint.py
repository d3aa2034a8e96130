"""GET /attestation: fresh evidence for one connection, as an ASGI application.

Made for a route under ``server.ratls_protocol``. A signature of the security processor takes
milliseconds and the processor does one at a time, so requests are limited, together and for each
connection: whoever wants to keep it busy has to pay for a TLS handshake every few requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from attestation.errors import AttestationError, BadNonceError, KeyRotatedError
from attestation.evidence import FRESH_MEDIA_TYPE, parse_nonce
from attestation.rate_limit import TokenBucket
from attestation.ratls import ServerIdentity, fresh_evidence

logger = logging.getLogger(__name__)

RATE, BURST = 50.0, 100
"""Requests per second, and at once, of all connections together."""

CONNECTION_RATE, CONNECTION_BURST = 0.2, 5
"""The same for one connection. A client needs one request for each connection it makes."""

MAX_QUERY_SIZE = 256
_REMEMBERED = 1024  # connections


class FreshEvidenceEndpoint:
    """Answers with canonical CBOR (``FRESH_MEDIA_TYPE``), or with a JSON error:

    400 no valid nonce; 405 not a GET; 409 the connection's key has been rotated out: connect anew;
    429 too many requests, with Retry-After; 500 the connection is not RA-TLS; 503 no evidence now.
    ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        *,
        rate: float = RATE,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._clock = identity, clock
        self._all = TokenBucket(rate=rate, burst=burst, clock=clock)
        self._connections: OrderedDict[bytes, TokenBucket] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        extensions = scope.get("extensions") or {}
        exporter, spki = extensions.get("ratls.exporter"), extensions.get("ratls.spki")
        if scope["method"] != "GET":
            await _refuse(send, 405, "method-refused", "Fresh evidence is read with GET.", "client")
            return
        if exporter is None or spki is None:
            await _refuse(send, 500, "not-ratls", "This connection is not RA-TLS.", "operator")
            return
        try:
            nonce = _nonce(scope["query_string"])
        except BadNonceError as error:
            await _refuse(send, 400, error.code, error.message, "client", error.remedy)
            return
        wait = self._connection(exporter).try_take() or self._all.try_take()
        if wait:
            retry = [(b"retry-after", str(math.ceil(wait)).encode())]
            message = "Too many requests for fresh evidence."
            await _refuse(send, 429, "rate-limited", message, "client", "Slow down.", retry)
            return
        try:
            body = await asyncio.to_thread(fresh_evidence, self._identity, nonce, exporter, spki=spki)
        except AttestationError as error:
            logger.warning("No fresh evidence: %s", error)
            status = 409 if isinstance(error, KeyRotatedError) else 503
            await _refuse(send, status, error.code, error.message, "operator", error.remedy)
            return
        await _respond(send, 200, body, FRESH_MEDIA_TYPE)

    def _connection(self, exporter: bytes) -> TokenBucket:
        bucket = self._connections.get(exporter)
        if bucket is None:
            bucket = TokenBucket(rate=CONNECTION_RATE, burst=CONNECTION_BURST, clock=self._clock)
            self._connections[exporter] = bucket
            if len(self._connections) > _REMEMBERED:
                self._connections.popitem(last=False)
        else:
            self._connections.move_to_end(exporter)
        return bucket


def _nonce(query: bytes) -> bytes:
    """Raises BadNonceError unless the query has exactly one valid nonce."""
    try:
        if len(query) > MAX_QUERY_SIZE:
            raise ValueError
        values = parse_qs(query.decode("ascii"), keep_blank_values=True, max_num_fields=4).get("nonce", [])
    except ValueError:
        raise BadNonceError("The query of the request cannot be read.") from None
    if len(values) > 1:
        raise BadNonceError("The request has more than one nonce.")
    return parse_nonce(values[0] if values else None)


async def _refuse(
    send: Any,
    status: int,
    code: str,
    message: str,
    fault: str,
    remedy: str = "",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    error = {"code": code, "message": message, "fault": fault, "remedy": remedy}
    await _respond(send, status, json.dumps({"error": error}).encode(), "application/json", headers)


async def _respond(
    send: Any,
    status: int,
    body: bytes,
    content_type: str,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    head = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
