"""Chat templates render as transformers renders them, within bounds, and fail with typed errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tee_runner.errors import InvalidRequestError, ModelError
from tee_runner.models import Tokenizer
from tee_runner.models.chat_template import MAX_RENDERED_CHARS, ChatTemplate, validate_messages

from .conftest import small_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi  there\n{{ 7 * 7 }} <b>&amp;</b> 😀"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  bye  "},
]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if loop.first %}\nU: {{ m.role }}\n  {% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[1].content | tojson }}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim + eos_token }}{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set s = namespace(n=0) %}{% for m in [1] %}{% set s.n = s.n + m %}{% endfor %}{{ s.n }}",
    "absent": "{% if tools %}T{% endif %}{% if documents is none %}N{% endif %}{{ '-' * 5 }}{{ 3 * 4 }}",
    "prompt": "{% if add_generation_prompt %}A:{% endif %}{{ strftime_now('%Y') | length }}",
    "slices": "{% set rest = messages[1:] %}{{ rest[0]['content'].split(' ')[-1] }}{{ rest | length }}",
}  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: Any = TALK, **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages, special_tokens=TOKENS, add_generation_prompt=True, **kwargs)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_as_transformers_does(source: str) -> None:
    (expected,), _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True, **TOKENS)
    assert render(source) == expected


@pytest.mark.model
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_default_model_template(generation_prompt: bool, smollm2_dir: Path) -> None:
    ours, theirs = Tokenizer(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)
    for messages in (TALK, TALK[1:], TALK[1:2], TALK[:1]):
        text = ours.apply_chat_template(messages, add_generation_prompt=generation_prompt)
        assert text == theirs.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, tokenize=False
        )
        ids = theirs.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=True)[
            "input_ids"
        ]
        assert ours.encode(text) == ids


def test_variables_reach_the_template_but_not_its_inputs() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    assert render(source, variables={"enable_thinking": False, "messages": []}) == "False4"


# The switch and the handling of past reasoning as Qwen3's template has them.
THINKING = """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}{%- set reasoning = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {%- set content = '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_thinking_can_be_switched(variables: dict[str, object]) -> None:
    reasoned = {"role": "assistant", "content": "<think>\nHm, 6 * 7.\n</think>\n\n42"}
    talk = [{"role": "user", "content": "6 * 7?"}, reasoned, {"role": "user", "content": "And 6 * 8?"}]
    for messages in (talk, talk[:1], talk[:2]):
        (expected,), _ = render_jinja_template(
            [messages], chat_template=THINKING, add_generation_prompt=True, **TOKENS, **variables
        )
        text = render(THINKING, messages, variables=variables)
        assert text == expected
        assert text.endswith("<think>\n\n</think>\n\n") == (variables == {"enable_thinking": False})
    assert "Hm" not in render(THINKING, talk)  # past reasoning is not repeated to the model


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"

    def source() -> str:
        template = Tokenizer(tmp_path).chat_template
        assert template is not None
        return template.source

    settings.write_text(json.dumps({"chat_template": "one"}))
    assert source() == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert source() == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert source() == "three"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError, match="chat_template"):
        Tokenizer(tmp_path)
    settings.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}]}))
    assert Tokenizer(tmp_path).chat_template is None


def test_refusal_is_the_clients_fault_and_quotes_only_the_template() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('no: ' + messages[1].content) }}")
    assert "Hi" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.undefined.thing }}",
        "{{ messages[1].content + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failing_templates_give_a_model_error_without_the_conversation(source: str) -> None:
    with pytest.raises(ModelError) as caught:
        render(source)
    assert "Hi" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_output_is_bounded() -> None:
    block = "x" * 10_000
    loop = f"{{% for i in range({MAX_RENDERED_CHARS // 10_000 + 1}) %}}{block}{{% endfor %}}"
    with pytest.raises(InvalidRequestError, match="exceeds"):
        render(loop)


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% unknown %}", "x" * 1_000_001])
def test_invalid_templates(source: str) -> None:
    with pytest.raises(ModelError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "text",
        [["user", "x"]],
        ["user"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "", "content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": "x", "extra": "y"}],
    ],
)
def test_malformed_messages(messages: object) -> None:
    with pytest.raises(InvalidRequestError):
        validate_messages(messages)
