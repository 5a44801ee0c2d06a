"""How does the API's description read in a browser?

One page made of the OpenAPI description alone: no script, no font, nothing that has to be fetched from anywhere, so it
reads the same on a machine without internet.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.rest.openapi import ERRORS

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #8886; padding-top: 1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8884; padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
"""
_BOUNDS = {"minimum": "from ", "exclusiveMinimum": "above ", "maximum": "up to ", "exclusiveMaximum": "below "}
_SIZES = {"maxLength": "characters", "maxItems": "of them"}


def docs_page(description: Mapping[str, Any]) -> str:
    """The page, whole. description: OpenAPI 3.1, as `app.openapi()` gives it."""
    info, schemas = description["info"], description["components"]["schemas"]
    parts = [
        f"<h1>{html.escape(info['title'])} {html.escape(info['version'])}</h1>",
        f'<p>{_text(info["description"])} For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    shown: list[str] = []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{_text(operation['description'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = _referred(body["content"]["application/json"]["schema"])
                parts.append(_fields(schemas[name]))
                shown.append(name)
            said = operation["responses"].items()
            errors = [(status, _text(answer["description"])) for status, answer in said if int(status) in ERRORS]
            if errors:
                parts.append(_table(("status", ""), errors))
    for name in _inner(schemas, shown):
        parts.append(f'<h2 id="{name}">{name}</h2><p>{_text(schemas[name].get("description", ""))}</p>')
        parts.append(_fields(schemas[name]))
    title = html.escape(info["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _referred(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _inner(schemas: Mapping[str, Any], shown: Iterable[str]) -> list[str]:
    """The schemas that fields of `shown` name, and the shape of errors."""
    text = json.dumps([schemas[name] for name in shown])
    return [name for name in schemas if f'/{name}"' in text] + ["Error"]


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{html.escape(name)}</code>{' (required)' if name in required else ''}",
            _kind(field),
            _text(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    )
    return _table(("field", "value", ""), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """What values a field takes, in words. Every field that need not be there may be null."""
    if "$ref" in schema:
        name = _referred(schema)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        if schema.get("maxItems") == 0:
            return "empty list"
        kind = f"list of {_kind(schema.get('items', {}))}"
    if "properties" in schema:
        kind = f"object of {', '.join(schema['properties'])}"
    bounds = [f"{words}{schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    bounds += [f"at most {schema[key]} {words}" for key, words in _SIZES.items() if key in schema]
    return ", ".join([kind, *bounds])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _text(text: str) -> str:
    """Escaped, with `code` marked."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
