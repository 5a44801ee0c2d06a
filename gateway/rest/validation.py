"""Is this HTTP body a request we can serve, and if not, which field is wrong?

From bytes to a checked schema object. Whatever a client sends ends as that object or as an ApiError that names the
field; JSON's own traps (NaN, numbers beyond any type, half a surrogate pair, nesting without end) are found before
any field is looked at, so that nothing behind this file has to think of them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.rest.problems import ApiError, invalid, too_large, too_slow
from gateway.rest.schemas import Schema

SchemaT = TypeVar("SchemaT", bound=Schema)

MAX_NUMBER_CHARACTERS = 400  # of one number in JSON; longer ones are refused instead of computed
MAX_INTEGER = 2**64
MAX_DEPTH = 64
MAX_FIELDS = 4096  # of one object: far more than any has use for, and each unknown one is an error to be made
MAX_SHOWN = 80


async def read_body(request: Request, max_bytes: int, deadline_s: float) -> bytes:
    """The whole body. Raises ApiError: 413 as soon as it is longer than `max_bytes`, or says that it will be;
    408 when it takes too long.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:MAX_NUMBER_CHARACTERS]) > max_bytes:
        raise too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(deadline_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise too_slow(deadline_s) from None
    return b"".join(parts)


def parse_request(body: bytes, schema: type[SchemaT]) -> SchemaT:
    """`body` as `schema`. Raises ApiError (400) naming the field."""
    content = _parse_json(body)
    if not isinstance(content, dict):
        raise invalid("body", "must be a JSON object", "invalid_json")
    for path, detail in _json_faults(content):
        raise invalid(_shorten(path or "body"), detail)  # a name may be empty
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise _first_fault(error, schema) from error


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_int=_parse_int, parse_float=_parse_float)
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise invalid("body", message, "invalid_json") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise invalid("body", f"is not JSON: {error.msg}: {where}", "invalid_json") from error
    except RecursionError as error:
        raise invalid("body", "is nested too deeply", "invalid_json") from error


def _parse_int(text: str) -> float | int:
    return int(text) if len(text) <= MAX_NUMBER_CHARACTERS else math.inf


def _parse_float(text: str) -> float:
    return float(text) if len(text) <= MAX_NUMBER_CHARACTERS else math.inf


def _json_faults(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and fault of each value that JSON can say and no field may have."""
    stack: list[tuple[str, dict[str, Any] | list[Any], int]] = [("", content, 0)]
    while stack:
        path, container, depth = stack.pop()
        if depth == MAX_DEPTH:
            yield path, "is nested too deeply"
        if isinstance(container, dict) and len(container) > MAX_FIELDS:
            yield path, f"has more than {MAX_FIELDS} fields"
        entries = container.items() if isinstance(container, dict) else enumerate(container)
        for key, entry in entries:
            if isinstance(key, str) and not _is_text(key):
                yield path, "has a field whose name holds half a surrogate pair"
            if isinstance(entry, dict | list):
                stack.append((_join(path, key), entry, depth + 1))
            elif (detail := _scalar_fault(entry)) is not None:
                yield _join(path, key), detail


def _scalar_fault(value: object) -> str | None:
    if isinstance(value, str):
        return None if _is_text(value) else "holds half a surrogate pair, which is not a character"
    if isinstance(value, float):
        return None if math.isfinite(value) else "is not a finite number"
    if isinstance(value, int):
        return None if abs(value) < MAX_INTEGER else "is too large a number"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _shorten(path: str) -> str:
    return path if len(path) <= MAX_SHOWN else path[: MAX_SHOWN - 3] + "..."


def _first_fault(error: ValidationError, schema: type[Schema]) -> ApiError:
    """The first thing pydantic found, in OpenAI's way of naming fields."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        path = _join(path, part)
    kind = first["type"]
    context = first.get("ctx", {})
    code: str | None = None
    if kind == "field_fault":
        path += str(context["path"])
        detail = str(context["detail"])
    elif kind == "missing":
        detail, code = "is required", "missing_required_parameter"
    elif kind == "extra_forbidden":
        detail, code = "is not a parameter known here", "unknown_parameter"
    elif path in schema.unsupported_fields():
        detail, code = "is not supported by this server", "unsupported_parameter"
    else:
        message = first["msg"]
        detail = message[:1].lower() + message[1:]
    return invalid(_shorten(path or "body"), detail, code)
