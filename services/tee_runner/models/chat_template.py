"""Render a model's Jinja chat template the way the template's authors tested it.

The environment matches Hugging Face transformers: immutable sandbox, ``trim_blocks``,
``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a plain ``tojson``, and the
``{% generation %}`` block, which only marks training targets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tee_runner.errors import InvalidRequestError, ModelError

MAX_TEMPLATE_CHARS: Final = 1_000_000
MAX_REPEATED_ITEMS: Final = 100_000
MAX_RENDERED_CHARS: Final = 8_000_000  # several times the longest context, in characters


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` renders its body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's type is fixed by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses powers and long repetitions: they fill memory in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if operator == "**" or (sizes and counts and sizes[0] * counts[0] > MAX_REPEATED_ITEMS):
            raise SecurityError(f"the operator {operator} would make too large a value")
        return super().call_binop(context, operator, left, right)


class _TemplateRefusalError(Exception):
    """The template called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusalError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # local time, as the templates expect


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template. Raises ``ModelError`` when ``source`` is not a valid template."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"The chat template has {len(source)} characters (limit {MAX_TEMPLATE_CHARS}).")
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"The chat template cannot be compiled: {error}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text for ``messages``.

        ``variables`` are further template inputs, such as ``enable_thinking``.
        Raises ``InvalidRequestError`` for malformed messages, for a conversation that the template
        refuses, and for a result of more than 8 million characters; ``ModelError`` when the template
        itself fails.
        """
        plain = validate_messages(messages)
        inputs: dict[str, object] = {**special_tokens, **(variables or {})}
        inputs.update(messages=plain, tools=None, documents=None, add_generation_prompt=add_generation_prompt)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(inputs):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    break
                pieces.append(piece)
        except _TemplateRefusalError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses this conversation{self._quotable(str(error))}."
            ) from None
        except Exception as error:  # whatever a template can provoke
            # The message of such an error may quote the conversation; its type does not.
            raise ModelError(f"The chat template failed with {type(error).__name__}.") from None
        if size > MAX_RENDERED_CHARS:
            raise InvalidRequestError(f"The rendered conversation exceeds {MAX_RENDERED_CHARS} characters.")
        return "".join(pieces)

    def _quotable(self, message: str) -> str:
        """The refusal's own words, when they are literally in the template and so no part of a prompt."""
        return f": {message.rstrip('.')}" if message and message in self.source else ""


def validate_messages(messages: object) -> list[dict[str, str]]:
    """``messages`` as fresh plain dicts, each with exactly the strings ``role`` and ``content``.

    Raises ``InvalidRequestError`` for anything else.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("A conversation is a non-empty list of messages.")
    plain: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequestError(f"Message {index} must have exactly the keys role and content.")
        role, content = message["role"], message["content"]
        if type(role) is not str or type(content) is not str or not role:
            raise InvalidRequestError(f"Role and content of message {index} must be strings.")
        plain.append({"role": role, "content": content})
    return plain
