"""The ASGI application."""

from __future__ import annotations

import asyncio
import math

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from attestation.errors import AttestationError, BadNonceError
from attestation.evidence import FRESH_MEDIA_TYPE, parse_nonce
from attestation.rate_limit import TokenBucket
from attestation.ratls import ServerIdentity, fresh_evidence
from tee_runner.api import errors, generate
from tee_runner.api.body_limit import BodyLimit
from tee_runner.engine.scheduler import Scheduler
from tee_runner.errors import CapacityError, GeloError, InvalidRequestError

# Fresh evidence costs a signature of the security processor, which takes milliseconds.
_EVIDENCE_RATE, _EVIDENCE_BURST = 50.0, 100


def create_app(scheduler: Scheduler, identity: ServerIdentity) -> FastAPI:
    """The service's routes. Serve it through ``attestation.server.ratls_protocol(identity)``."""
    app = FastAPI(title="GELO", description="Confidential LLM inference", docs_url=None, redoc_url=None)
    app.state.scheduler = scheduler
    app.add_middleware(BodyLimit)
    errors.install(app)
    app.include_router(generate.router)
    bucket = TokenBucket(rate=_EVIDENCE_RATE, burst=_EVIDENCE_BURST)

    @app.get("/attestation")
    async def attestation(request: Request) -> Response:
        """Fresh evidence over the client's nonce and this connection's exporter (RFC 9266)."""
        try:
            nonce = parse_nonce(request.query_params.get("nonce"))
        except BadNonceError as error:
            raise InvalidRequestError(
                error.message, remedy="Send ?nonce= with 64 hexadecimal digits."
            ) from None
        extensions = request.scope.get("extensions") or {}
        exporter = extensions.get("ratls.exporter")
        if exporter is None:
            raise GeloError("This connection is not RA-TLS.")
        wait = bucket.try_take()
        if wait:
            refusal = errors.error_response(CapacityError("Too many evidence requests.", remedy="Slow down."))
            refusal.status_code = 429
            refusal.headers["retry-after"] = str(math.ceil(wait))
            return refusal
        try:
            body = await asyncio.to_thread(
                fresh_evidence, identity, nonce, exporter, spki=extensions.get("ratls.spki")
            )
        except AttestationError as error:
            raise GeloError(error.message, remedy=error.remedy) from None
        return Response(body, media_type=FRESH_MEDIA_TYPE, headers={"cache-control": "no-store"})

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests can be served, 503 while the worker is away."""
        connected = scheduler.runtime.connected
        body = {"status": "ok" if connected else "degraded", "worker_connected": connected}
        return JSONResponse(body, status_code=200 if connected else 503)

    return app
