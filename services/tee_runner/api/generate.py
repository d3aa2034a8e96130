"""``POST /generate``: from a request body to the scheduler and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tee_runner.api.errors import error_body, error_response
from tee_runner.api.protocol import (
    DoneChunk,
    ErrorChunk,
    GenerateRequest,
    GenerateResponse,
    TokenChunk,
    Usage,
)
from tee_runner.engine.sampling import SamplingParams
from tee_runner.engine.scheduler import Scheduler
from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, Sequence
from tee_runner.errors import GeloError

router = APIRouter()
_DISCONNECT_POLL_S = 0.2
# A client that stops reading holds at most this many events before its request is cancelled.
_MAX_QUEUED_EVENTS = 100_000


class _Generation:
    """A submitted request whose events arrive on this event loop."""

    def __init__(self, scheduler: Scheduler, request: GenerationRequest) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(self._put, event)
            except RuntimeError:  # the loop has ended: nobody listens any more
                self.sequence.cancel()

        self.sequence: Sequence = scheduler.submit(request, sink)

    def _put(self, event: Event) -> None:
        self._events.put_nowait(event)
        if self._events.qsize() > _MAX_QUEUED_EVENTS:
            self.sequence.cancel()

    async def next(self) -> Event:
        return await self._events.get()


def _to_engine(body: GenerateRequest, scheduler: Scheduler) -> GenerationRequest:
    tokenizer = scheduler.runtime.model.tokenizer
    if body.messages is not None:
        messages = [{"role": m.role, "content": m.content} for m in body.messages]
        text = tokenizer.apply_chat_template(messages, variables=body.chat_template_kwargs)
        ids = tokenizer.encode(text)
    else:
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=True)
    return GenerationRequest(
        prompt=tuple(ids),
        max_tokens=body.max_tokens,
        sampling=SamplingParams(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=body.seed
        ),
        stop=body.stops(),
    )


@router.post("/generate", response_model=None, responses={200: {"model": GenerateResponse}})
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Answer a prompt, whole or as server-sent events."""
    scheduler: Scheduler = request.app.state.scheduler
    generation = _Generation(scheduler, await asyncio.to_thread(_to_engine, body, scheduler))
    if body.stream:
        return StreamingResponse(
            _stream(generation), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
    return await _whole(generation, request)


async def _whole(generation: _Generation, request: Request) -> Response:
    text = []
    try:
        while True:
            try:
                event = await asyncio.wait_for(generation.next(), _DISCONNECT_POLL_S)
            except TimeoutError:
                if await request.is_disconnected():
                    return Response(status_code=499)
                continue
            text.append(event.text)
            if isinstance(event, FinishEvent):
                break
    finally:
        generation.sequence.cancel()
    failure = _failure(event)
    if failure is not None:
        return error_response(failure)
    body = GenerateResponse(text="".join(text), finish_reason=_reason(event), usage=_usage(event))
    return JSONResponse(body.model_dump(), headers={"cache-control": "no-store"})


async def _stream(generation: _Generation) -> AsyncIterator[str]:
    try:
        while True:
            event = await generation.next()
            if not isinstance(event, FinishEvent):
                yield _sse(TokenChunk(token_id=event.token_id, text=event.text).model_dump_json())
                continue
            failure = _failure(event)
            if failure is not None:
                yield _sse(ErrorChunk(error=error_body(failure)).model_dump_json())
            else:
                done = DoneChunk(text=event.text, finish_reason=_reason(event), usage=_usage(event))
                yield _sse(done.model_dump_json())
            return
    finally:
        # Reached at the end and when the client disconnects.
        generation.sequence.cancel()


def _sse(data: str) -> str:
    return f"data: {data}\n\n"


def _failure(event: FinishEvent) -> GeloError | None:
    if event.error is not None:
        return event.error
    if event.reason == "cancelled":
        return GeloError("The request was cancelled: the service is shutting down.")
    return None


def _reason(event: FinishEvent) -> Literal["stop", "length"]:
    return "stop" if event.reason == "stop" else "length"


def _usage(event: FinishEvent) -> Usage:
    return Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        total_tokens=event.prompt_tokens + event.completion_tokens,
    )
