"""By what a request keeps its version."""

from typing import Any

import msgspec
import pytest

from ingress.schemas import ChatBody, CompletionBody
from ingress.stickiness import sticky_key

SYSTEM = {"role": "system", "content": "You are terse."}
FIRST = {"role": "user", "content": "What is a queue?"}
ANSWER = {"role": "assistant", "content": "A line."}
SECOND = {"role": "user", "content": "And a stack?"}


def key(*messages: dict[str, str], session: str | None = None, tenant: str = "acme", **fields: Any) -> str:
    body = msgspec.convert({"model": "m", "messages": messages, **fields}, ChatBody)
    return sticky_key(session, body, tenant)


def test_the_order_of_what_names_a_session() -> None:
    named = {"user": "u", "prompt_cache_key": "p"}
    assert key(SYSTEM, FIRST, session="s", **named) == "s"
    assert key(SYSTEM, FIRST, **named) == "p"
    assert key(SYSTEM, FIRST, user="u") == "u"
    assert key(SYSTEM, FIRST) not in ("s", "p", "u")


@pytest.mark.parametrize("start", [[SYSTEM, FIRST], [FIRST, ANSWER, SECOND], [SYSTEM, SYSTEM, FIRST]])
def test_a_conversation_keeps_its_key_as_it_grows(start: list[dict[str, str]]) -> None:
    grown = [*start, ANSWER, {"role": "user", "content": "Thanks."}]
    assert key(*start) == key(*grown)
    assert key(*start) != key(*start, tenant="other")
    other = [{"role": "user", "content": "Hello."} if message is FIRST else message for message in start]
    assert key(*start) != key(*other)


def test_what_is_no_conversation_is_drawn() -> None:
    assert key(FIRST) != key(FIRST)
    body = msgspec.convert({"model": "m", "prompt": "p"}, CompletionBody)
    assert sticky_key(None, body, "acme") != sticky_key(None, body, "acme")
    empty = msgspec.convert({"model": "m", "messages": []}, ChatBody)
    assert sticky_key(None, empty, "acme")  # that it is wrong is told later
