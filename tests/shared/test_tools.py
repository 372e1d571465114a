"""How a model writes tool calls, by the files that come with it."""

import json

import pytest

from shared.tools import dialect_of, takes_tools, template_of

QWEN = "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}<tool_call>"
LLAMA = "{%- if not tools is defined %}{%- set tools = none %}{% endif %}{{ '<|python_tag|>' }} ipython"
MISTRAL = '{{ "[AVAILABLE_TOOLS] [" }}{% for tool in tools %}{% endfor %}{{ "[TOOL_CALLS] [" }}'
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (QWEN, "hermes"),
        (LLAMA, "llama3"),
        (MISTRAL, "mistral"),
        (PLAIN, "hermes"),
        ("", "hermes"),
        ("ipython", "hermes"),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, dialect: str) -> None:
    assert dialect_of(template) == dialect


def test_whether_a_template_shows_tools() -> None:
    assert takes_tools(QWEN)
    assert not takes_tools(PLAIN)
    assert not takes_tools("{{ mytools_list }}")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("chat_template.jinja", LLAMA.encode()),
        ("tokenizer_config.json", json.dumps({"eos_token": {"a": 1}, "chat_template": LLAMA}).encode()),
        ("chat_template.json", json.dumps({"chat_template": LLAMA}).encode()),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "a", "template": PLAIN}, {"name": "tool_use", "template": LLAMA}]}).encode(),
        ),
    ],
)  # fmt: skip
def test_the_template_is_found_wherever_it_is(name: str, raw: bytes) -> None:
    assert dialect_of(template_of({name: raw})) == "llama3"


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"\xff\xfe", b'{"chat_template": 7}', b'{"chat_template": [1, {"template": 2}]}']
)
def test_files_that_cannot_be_read_say_nothing(raw: bytes) -> None:
    assert template_of({"tokenizer_config.json": raw}) == ""
