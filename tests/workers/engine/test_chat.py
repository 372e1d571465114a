"""Messages with tools as prompts: templates that take tools, and those that have to be helped."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_byte_tokenizer

from shared.errors import BadRequest
from shared.wire import ChatMessage
from workers.engine.chat import ChatTemplate
from workers.engine.tokenizer import HuggingFaceText, load_tokenizer

PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
NATIVE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.id }}:{{ call.function | tojson }}{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
TURNS = [
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", None, tool_calls=[CALL, CALL | {"id": "call_2"}]),
    ChatMessage("tool", "21", tool_call_id="call_1"),
    ChatMessage("tool", "22", tool_call_id="call_2"),
    ChatMessage("user", "So?"),
]


@pytest.fixture
def template(tmp_path: Any) -> Any:
    def make(text: str) -> ChatTemplate:
        save_byte_tokenizer(tmp_path, text)
        return ChatTemplate(load_tokenizer(tmp_path))

    return make


def test_a_template_that_takes_tools_gets_them(template: Any) -> None:
    call = '{"name": "weather", "arguments": {"city": "Zürich"}}'
    assert template(NATIVE).render(TURNS, [TOOL]) == (
        f"[weather]<user>Weather?<assistant>call_1:{call}call_2:{call}<tool>21(call_1)<tool>22(call_2)<user>So?"
    )
    assert template(NATIVE).render(TURNS[:1], None) == "<user>Weather?"


def test_a_template_that_takes_none_is_helped_in_the_words_of_hermes(template: Any) -> None:
    text = template(PLAIN).render(TURNS, [TOOL])
    system, rest = text.split("<user>", 1)
    assert system.startswith("<system>You are a function calling AI model.")
    assert '<tools>\n{"type": "function", "function": {"name": "weather", "description": "é", ' in system
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in system
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert rest == (
        f"Weather?<assistant>{call}\n{call}<user><tool_response>\n21\n</tool_response>\n"
        "<tool_response>\n22\n</tool_response><user>So?"
    )


def test_a_system_message_keeps_its_place_and_its_words(template: Any) -> None:
    turns = [ChatMessage("system", "Be brief."), ChatMessage("assistant", "Hm.", tool_calls=[CALL])]
    text = template(PLAIN).render(turns, [TOOL])
    assert text.startswith("<system>Be brief.\n\nYou are a function calling AI model.")
    assert text.count("<system>") == 1
    assert "<assistant>Hm.\n<tool_call>" in text
    assert "tools>" not in template(PLAIN).render(turns, None)


def test_a_template_is_not_helped_where_there_is_nothing_to_help_with(template: Any) -> None:
    assert template(PLAIN).render([ChatMessage("user", "Hi")], None) == "<user>Hi"


def test_ids_are_cut_to_nine_for_templates_of_mistral(template: Any) -> None:
    text = template(NATIVE + "{# [TOOL_CALLS] #}").render(TURNS, [TOOL])
    ids = [part.split(":{")[0] for part in text.split("<assistant>")[1].split("}}")[:2]]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(set(ids)) == 2
    assert text.endswith(f"<tool>21({ids[0]})<tool>22({ids[1]})<user>So?")
    kept = ChatMessage("assistant", None, tool_calls=[CALL | {"id": "abcDEF123"}])
    assert "abcDEF123" in template(NATIVE + "{# [TOOL_CALLS] #}").render([kept], None)


def test_of_several_templates_the_one_for_tools_is_taken() -> None:
    taken: dict[str, Any] = {}
    tokenizer = SimpleNamespace(
        chat_template={"default": PLAIN, "tool_use": NATIVE},
        apply_chat_template=lambda turns, **options: taken.update(options) or "text",
    )
    assert ChatTemplate(tokenizer).render(TURNS[:1], [TOOL]) == "text"
    assert taken["tools"] == [TOOL]


def test_what_a_template_refuses_is_the_callers_to_mend(template: Any) -> None:
    with pytest.raises(BadRequest, match="only one call"):
        template("{{ raise_exception('only one call') }}{{ tools }}").render(TURNS, [TOOL])


def test_special_tokens_are_text_only_where_they_are_asked_for(tmp_path: Any) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    text = HuggingFaceText(tokenizer, len(tokenizer), frozenset({256}))
    ids = tokenizer("é[TOOL_CALLS]f[ARGS]{}é", add_special_tokens=False)["input_ids"]
    for shown, expected in (((), "éf{}é"), (("[TOOL_CALLS]", "[ARGS]", "<unknown>"), "é[TOOL_CALLS]f[ARGS]{}é")):
        stream = text.stream([1, 2], shown)
        assert "".join(stream.step(token) for token in ids) + stream.flush() == expected
    stream = text.stream([], ("[ARGS]",))  # half a character before it is one that is damaged
    assert (stream.step(ids[0]), stream.step(tokenizer.convert_tokens_to_ids("[ARGS]"))) == ("", "\ufffd[ARGS]")
