"""JSON bytes -> the body of a route, and msgspec's refusals in the words of our errors."""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ingress.schemas import Body
from shared import refusals
from shared.errors import BadRequest

BodyType = TypeVar("BodyType", bound=msgspec.Struct)

_MISSING = re.compile(r"^object missing required field `(?P<field>[^`]*)`$")


def decode(decoder: msgspec.json.Decoder[BodyType], raw: bytes) -> BodyType:
    """The body of a request. Raises BadRequest that names the place, e.g. `messages[0].role`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), getattr(decoder.type, "ROLES", Body.ROLES)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refusal(text: str, roles: Sequence[str]) -> BadRequest:
    path, problem = refusals.read(text)
    missing = _MISSING.match(problem)
    if missing:
        path, problem = f"{path}.{missing['field']}".lstrip("."), "missing"
    elif path.endswith("role"):
        problem = f"{problem}, one of {', '.join(roles)} is expected"
    return BadRequest(f"{path}: {problem}" if path else f"the body: {problem}", param=path or None)
