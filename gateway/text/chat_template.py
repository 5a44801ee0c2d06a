"""Which prompt does a conversation become for this model?

Renders the chat template of a model directory (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`)
the way transformers does: Jinja with `trim_blocks`, `lstrip_blocks`, loop controls, `tojson`, `raise_exception` and
`strftime_now`, in a sandbox, because a template is code that came with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.text.errors import TemplateRefusal, TextError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the names of the special tokens it may use. Immutable; safe to share."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "chat_template") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(f"{name}: is not a template: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """The directory's template, or None where the model has none. Raises TextError naming the file."""
        config_path = directory / "tokenizer_config.json"
        config = _read_json(config_path) if config_path.exists() else {}
        special_tokens = {
            key: text for key, value in config.items() if key.endswith("_token") and (text := _token_text(value))
        }
        path = directory / "chat_template.jinja"
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), special_tokens, str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise TextError(f"{path}: cannot be read: {error}") from error
        source = _named_template(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens, str(config_path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. variables: more names for the template (`enable_thinking`, ...).

        Raises TemplateRefusal with the template's own words, or with what broke in it.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        names["messages"] = [dict(message) for message in messages]
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(error.message or "the chat template refused the messages") from error
        except Exception as error:  # a template is foreign code: what it raises says that it cannot take these messages
            raise TemplateRefusal(f"the chat template cannot take these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TextError(f"{path}: must be a JSON object")
    return content


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_template(value: Any) -> str | None:
    """`chat_template` is a template, or a list of named ones of which "default" is meant."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return str(entry["template"])
    return None
