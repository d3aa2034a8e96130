"""Refuses request bodies beyond a bound before they are collected."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16 << 20


class BodyLimit:
    """ASGI middleware: 413 once a body exceeds ``limit`` bytes, declared or sent."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._limit:
            await self._refuse(scope, receive, send)
            return
        received = 0
        exceeded = False
        started = False

        async def counted() -> Message:
            nonlocal received, exceeded
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                # Whatever the application makes of a client that left is replaced below.
                exceeded = True
                return {"type": "http.disconnect"}
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if exceeded:
                return
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        finally:
            if exceeded and not started:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"The body exceeds {self._limit} bytes."
        error = {"code": "body_too_large", "message": message, "fault": "client", "remedy": ""}
        await JSONResponse({"error": error}, status_code=413)(scope, receive, send)
