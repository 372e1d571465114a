"""The OpenAPI document of routes whose bodies are msgspec structs."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from ingress.error_shapes import AnthropicError, Error
from ingress.family import Family
from ingress.schemas import Body

REF_TEMPLATE = "#/components/schemas/{name}"
PATH_PARAMETER = {"in": "path", "required": True, "schema": {"type": "string"}}


MODEL_PARAMETER = PATH_PARAMETER | {"name": "model"}


def inference(family: Family) -> dict[str, Any]:
    """Arguments of the FastAPI route of an inference family: its body and its two kinds of answer."""
    arguments = answer(family.answer_type)
    if "stream" not in family.decoder.type.not_served():
        arguments["responses"][200]["description"] += "; with `stream: true` server-sent events"
        arguments["responses"][200]["content"]["text/event-stream"] = {}
    arguments["responses"]["default"] = {"description": "An error", "content": _json(family.errors.type)}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": _json(family.decoder.type)}}
    if "{model" in family.route:
        extra["parameters"] = [MODEL_PARAMETER]
    return arguments | {"summary": family.summary, "openapi_extra": extra}


def answer(answer_type: Any, status: int = 200) -> dict[str, Any]:
    """Arguments of a FastAPI route: its answer."""
    return {"responses": {status: {"description": "The answer", "content": _json(answer_type)}}}


def told(body_type: Any, answer_type: Any, *parameters: str, status: int = 200) -> dict[str, Any]:
    """Arguments of a FastAPI route that takes a body (None: it takes none) and has parameters in its path."""
    extra: dict[str, Any] = {"parameters": [PATH_PARAMETER | {"name": name} for name in parameters]}
    if body_type is not None:
        extra["requestBody"] = {"required": True, "content": _json(body_type)}
    return answer(answer_type, status) | {"openapi_extra": extra}


def install(app: FastAPI, types: Sequence[Any]) -> None:
    """Make `app` describe `types`, which its routes refer to; what is not served is left out."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        found = generate()
        _, components = msgspec.json.schema_components([*types, Error, AnthropicError], ref_template=REF_TEMPLATE)
        for body in types:
            if isinstance(body, type) and issubclass(body, Body):
                for name in body.not_served():
                    components[body.__name__]["properties"].pop(name)
        for operation in (each for methods in found["paths"].values() for each in methods.values()):
            operation["responses"].pop("422", None)  # FastAPI's own: what it refuses is a 400 here
            operation["responses"].setdefault("default", {"description": "An error", "content": _json(Error)})
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(components)
        return found

    app.openapi = document  # type: ignore[method-assign]


def _json(described: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components((described,), ref_template=REF_TEMPLATE)
    return {"application/json": {"schema": schema}}
