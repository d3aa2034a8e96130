"""Errors as JSON. No response and no log line repeats what a request contained."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tee_runner.api.protocol import ErrorBody, ErrorResponse
from tee_runner.errors import CapacityError, Fault, GeloError, InvalidRequestError, ModelError, WorkerError
from tee_runner.hardening import where

log = logging.getLogger(__name__)


def error_body(error: GeloError) -> ErrorBody:
    """A typed error as its wire form."""
    return ErrorBody(code=error.code, message=error.message, fault=error.fault, remedy=error.remedy)


def status_of(error: GeloError) -> int:
    """400 for the client's faults, 503 for capacity, 502 for the worker's, else 500."""
    if isinstance(error, InvalidRequestError):
        return 400
    # A chat template refuses a conversation: the client can send another.
    if isinstance(error, ModelError):
        return 400
    if isinstance(error, CapacityError):
        return 503
    return 502 if isinstance(error, WorkerError) else 500


def error_response(error: GeloError) -> JSONResponse:
    """The response for a typed error."""
    return _response(status_of(error), error_body(error))


def _response(status: int, body: ErrorBody) -> JSONResponse:
    return JSONResponse(ErrorResponse(error=body).model_dump(), status_code=status)


def _plain(status: int, code: str, message: str, fault: Fault, remedy: str = "") -> JSONResponse:
    return _response(status, ErrorBody(code=code, message=message, fault=fault, remedy=remedy))


def without_values(app: ASGIApp) -> ASGIApp:
    """``app``, with unexpected exceptions logged by type and place only.

    The framework answers them and raises them again, and the server would then log the
    message, which may quote what a request contained.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            log.error("a request failed: %s", where(error))

    return guarded


def install(app: FastAPI) -> None:
    """Give every failure the same JSON shape."""

    @app.exception_handler(GeloError)
    async def typed(request: Request, error: GeloError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # The error's own text would repeat the input; location and rule are enough.
        problems = [
            f"{'.'.join(str(part) for part in item['loc'][1:]) or 'body'}: {item['msg']}"
            for item in error.errors()[:8]
        ]
        return _plain(400, "invalid_request", "; ".join(problems), "client", "See /openapi.json.")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return _plain(error.status_code, "http_error", str(error.detail), "client")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return _plain(500, "internal_error", "The request failed inside the runner.", "internal")
