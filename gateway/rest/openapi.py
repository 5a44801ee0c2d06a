"""How do the endpoints describe themselves at /docs?

Requests are checked by hand (see `validation`), so FastAPI cannot see their types; this puts the schemas into its
description.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from gateway.rest.schemas import ChatCompletionRequest, CompletionRequest

DESCRIPTION = (
    "OpenAI-compatible text generation with speculative decoding. Beyond OpenAI's fields: `draft_len` (0: no "
    "speculation; at most `max_draft_len` of `/v1/models`), `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, "
    "`ignore_eos` in requests; "
    "`choices[i].outrider` (token ids, and which of them were accepted drafts) and `usage.outrider` in answers. "
    "With `stream: true` the answer is a stream of server-sent events."
)

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _error(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
    }


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error("A field is wrong; `param` names it."),
    404: _error("No such model."),
    413: _error("The body is too long."),
    429: _error("Too many requests wait; a place should be free after `Retry-After` seconds."),
    503: _error("The target is away, the request waited too long, or the gateway stops; see `Retry-After`."),
}


def body(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint whose body is `schema`."""
    reference = {"$ref": _REFERENCE.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` (and so /openapi.json and /docs) know the request schemas."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = _ERROR
            for schema in (CompletionRequest, ChatCompletionRequest):
                content = schema.model_json_schema(ref_template=_REFERENCE)
                schemas.update(content.pop("$defs", {}))
                schemas[schema.__name__] = content
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]
