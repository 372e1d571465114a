"""msgspec's refusals in the words of our errors."""

from typing import Annotated, Literal

import msgspec
import pytest

from shared import refusals


class Said(msgspec.Struct):
    role: Literal["user", "assistant"]


class Asked(msgspec.Struct):
    said: str | list[Said] | None = None
    events: tuple[Annotated[Literal["begin", "end"], msgspec.Meta(description="a type")], ...] = ()
    kinds: dict[str, Literal["one", "two"]] = {}
    size: int = 0


@pytest.mark.parametrize(
    ("given", "place", "problem"),
    [
        ({"said": [{"role": "boss"}]}, "said[0].role", "invalid enum value 'boss', one of assistant, user is expected"),
        ({"events": ["end", "x"]}, "events[1]", "invalid enum value 'x', one of begin, end is expected"),
        ({"kinds": {"a": "x"}}, "kinds", "invalid enum value 'x', one of one, two is expected"),
        ({"size": "x"}, "size", "expected `int`, got `str`"),
    ],
)
def test_a_word_that_is_none_is_told_those_that_are(given: object, place: str, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(given, Asked)
    assert refusals.read(str(refused.value), Asked) == (place, problem)
