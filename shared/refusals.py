"""msgspec's refusals in the words of our errors."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_PLACE = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(?:\d+|\.\.\.)\]")
_TIME_OF_DAY = "matching regex '^([01][0-9]|2[0-3])"


def read(text: str, kind: Any = None) -> tuple[str, str]:
    """The place, e.g. `limits.warm`, empty for the whole, and the problem, of the text of a msgspec.ValidationError.

    With `kind`, the type that a value was refused as, the problem says what a word could have been.
    """
    place = _PLACE.match(text)
    problem, path = (place["problem"], (place["path"] or "").lstrip(".")) if place else (text, "")
    if _TIME_OF_DAY in problem:
        problem = "a time of the day is expected, from 00:00 to 23:59"
    if kind is not None and problem.startswith("Invalid enum value"):
        choices = dict.fromkeys(_words([_shape(kind)], path))
        problem += f", one of {', '.join(choices)} is expected" if choices else ""
    # [...]: some value; msgspec does not say which
    return path.removesuffix("[...]"), problem[:1].lower() + problem[1:]


@cache
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _words(shapes: list[inspect.Type], path: str) -> Iterator[str]:
    """The words of the literals at the place `path` of any of these."""
    for step in _STEP.finditer(path):
        shapes = [inner for shape in _alone(shapes) for inner in _below(shape, step[1])]
    return (str(word) for shape in _alone(shapes) if isinstance(shape, inspect.LiteralType) for word in shape.values)


def _alone(shapes: list[inspect.Type]) -> Iterator[inspect.Type]:
    """`shapes` with the members of unions in place of these."""
    for shape in shapes:
        if isinstance(shape, inspect.Metadata):
            yield from _alone([shape.type])
        elif isinstance(shape, inspect.UnionType):
            yield from _alone(list(shape.types))
        else:
            yield shape


def _below(shape: inspect.Type, name: str | None) -> list[inspect.Type]:
    """What is at the field `name`, or, for None, what the items or values are."""
    if name is not None:
        fields = shape.fields if isinstance(shape, inspect.StructType) else ()
        return [field.type for field in fields if field.encode_name == name]
    if isinstance(shape, inspect.DictType):
        return [shape.key_type, shape.value_type]
    if isinstance(shape, inspect.CollectionType):
        return [shape.item_type]
    return []
