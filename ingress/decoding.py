"""JSON bytes -> the body of a route, and msgspec's refusals in the words of our errors."""

import re
from typing import Any, TypeVar

import msgspec

from shared import refusals
from shared.errors import BadRequest

BodyType = TypeVar("BodyType", bound=msgspec.Struct)

_MISSING = re.compile(r"^object missing required field `(?P<field>[^`]*)`$")


def decode(decoder: msgspec.json.Decoder[BodyType], raw: bytes) -> BodyType:
    """The body of a request. Raises BadRequest that names the place, e.g. `messages[0].role`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refusal(text: str, kind: Any) -> BadRequest:
    path, problem = refusals.read(text, kind)
    missing = _MISSING.match(problem)
    if missing:
        path, problem = f"{path}.{missing['field']}".lstrip("."), "missing"
    return BadRequest(f"{path}: {problem}" if path else f"the body: {problem}", param=path or None)
