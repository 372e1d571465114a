"""Pages of a list as OpenAI's API has them: `limit`, `after` and `order`."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request

from shared import refusals
from shared.errors import BadRequest

LIMIT = 20

PARAMETERS: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
]


class Page(msgspec.Struct):
    """Which part of a list is wanted."""

    limit: Annotated[int, Meta(ge=1, le=100)] = LIMIT
    after: str | None = None  # an id: what follows it
    order: Annotated[str, Meta(pattern="^(asc|desc)$")] = "desc"

    def of(self, ids: list[str]) -> list[str]:
        """`ids` from the page's begin to their end; they come with the oldest first, in the order of their ids."""
        wanted = ids if self.order == "asc" else ids[::-1]
        if self.after is None:
            return wanted
        return [each for each in wanted if (each > self.after if self.order == "asc" else each < self.after)]


def page_of(request: Request) -> Page:
    """Raises BadRequest."""
    asked = {name: request.query_params[name] for name in Page.__struct_fields__ if name in request.query_params}
    try:
        return msgspec.convert(asked, Page, strict=False)
    except msgspec.ValidationError as error:
        name, problem = refusals.read(str(error))
        raise BadRequest(f"{name}: {problem}", param=name or None) from None
