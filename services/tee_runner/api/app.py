"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route

from attestation.endpoint import FreshEvidenceEndpoint
from attestation.ratls import ServerIdentity
from tee_runner.api import errors, generate
from tee_runner.api.body_limit import BodyLimit
from tee_runner.engine.scheduler import Scheduler


def create_app(scheduler: Scheduler, identity: ServerIdentity) -> FastAPI:
    """The service's routes. Serve it through ``attestation.server.ratls_protocol(identity)``."""
    app = FastAPI(title="GELO", description="Confidential LLM inference", docs_url=None, redoc_url=None)
    app.state.scheduler = scheduler
    app.add_middleware(BodyLimit)
    errors.install(app)
    app.include_router(generate.router)
    app.router.routes.append(Route("/attestation", FreshEvidenceEndpoint(identity)))

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests can be served, 503 while the worker is away."""
        connected = scheduler.runtime.connected
        body = {"status": "ok" if connected else "degraded", "worker_connected": connected}
        return JSONResponse(body, status_code=200 if connected else 503)

    return app
