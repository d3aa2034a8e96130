"""Request and response bodies."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TEXT_CHARS = 4_000_000
MAX_MESSAGES = 1_000

StopString = Annotated[str, Field(min_length=1, max_length=256)]

_TEMPLATE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_TEMPLATE_TEXT = 1024
# What the service itself gives to a template.
_TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_TEXT_CHARS)


class GenerateRequest(BaseModel):
    """``POST /generate``: exactly one of ``prompt`` (raw text) and ``messages`` (chat template)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT_CHARS)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(default=256, ge=1, le=1_000_000)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=1 << 20, description="0 keeps every token")
    seed: int | None = Field(default=None, ge=0, lt=1 << 64)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=16)] = Field(
        default_factory=dict,
        description="inputs of the chat template, such as enable_thinking: booleans, numbers, short strings",
    )

    @model_validator(mode="after")
    def _one_input(self) -> GenerateRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("chat_template_kwargs go with messages")
        # Checked here and not by type: an error of pydantic's would repeat the name.
        for name, value in self.chat_template_kwargs.items():
            if not _TEMPLATE_NAME.fullmatch(name) or name in _TEMPLATE_INPUTS or name.endswith("_token"):
                raise ValueError("chat_template_kwargs have a name that is malformed or taken")
            if type(value) not in (bool, int, float, str, type(None)) or len(str(value)) > _MAX_TEMPLATE_TEXT:
                raise ValueError(
                    "chat_template_kwargs have a value that is not a boolean, number or short string"
                )
        return self

    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(BaseModel):
    """The whole answer, when not streaming."""

    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage


class ErrorBody(BaseModel):
    """What went wrong, whose fault it is, what to do."""

    code: str
    message: str
    fault: str
    remedy: str = ""


class ErrorResponse(BaseModel):
    """Every error has this shape."""

    error: ErrorBody


class TokenChunk(BaseModel):
    """One server-sent event per generated token."""

    type: Literal["token"] = "token"
    token_id: int
    text: str


class DoneChunk(BaseModel):
    """The last event of a stream that ended well."""

    type: Literal["done"] = "done"
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage


class ErrorChunk(BaseModel):
    """The last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: ErrorBody
