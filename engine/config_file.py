"""How is a service's section read from the one config file?

The file is YAML with the top-level keys `model`, `target`, `drafter`, `gateway`; each service reads `model` and its
own section and never looks into another's. Every mistake becomes a ConfigError of one line that names the key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import ConfigError

TOP_LEVEL_KEYS = ("model", "target", "drafter", "gateway")


class SectionModel(BaseModel):
    """Base of the section models: unknown keys are refused, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def check_together(self) -> None:
        """Raises ConfigError naming the key of a value that does not go with the others. For those that can."""


SectionT = TypeVar("SectionT", bound=BaseModel)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The file as a mapping with only known top-level keys. ConfigError when unreadable, not YAML or not a mapping."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise ConfigError(str(path), f"cannot be read: {reason}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), "not valid YAML: " + " ".join(str(error).split())) from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"must be a mapping with the keys {', '.join(TOP_LEVEL_KEYS)}")
    for key in content:
        if key not in TOP_LEVEL_KEYS:
            raise ConfigError(str(key), f"unknown key; allowed are {', '.join(TOP_LEVEL_KEYS)}")
    return content


def load_section(path: str | Path, section: str, model: type[SectionT]) -> SectionT:
    """Section `section` of the file as `model`; a missing or empty section gives the model's defaults.

    Unknown keys are refused at the section's top level whatever the model says; nested models decide for themselves
    (SectionModel refuses).
    """
    raw = read_config_file(path).get(section)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(section, "must be a mapping")
    return parse_section(raw, section, model)


def parse_section(raw: dict[Any, Any], section: str, model: type[SectionT]) -> SectionT:
    """The mapping `raw` as `model`. ConfigError names the first key at fault as `section.key`."""
    known = set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}
    for key in raw:
        if key not in known:
            raise ConfigError(f"{section}.{key}", f"unknown key; allowed are {', '.join(sorted(known))}")
    try:
        found = model.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error, section) from error
    if isinstance(found, SectionModel):
        found.check_together()
    return found


def check_file(section: str, model: type[BaseModel], arguments: Sequence[str] | None = None) -> int:
    """A program that takes a config file's path and checks one section of it. Returns its exit status: 2 after a line
    on stderr that says what is wrong.
    """
    (path,) = sys.argv[1:] if arguments is None else arguments
    try:
        load_section(path, section, model)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def load_model_name(path: str | Path, override: str | None = None) -> str:
    """The top-level `model:` (a name, hub id or directory), or `override` when given. ConfigError when there is
    neither.
    """
    if override:
        return override
    name = read_config_file(path).get("model")
    if not isinstance(name, str) or not name:
        raise ConfigError("model", "must name a model: a directory, a hub id, or a built-in name")
    return name


def _first_error(error: ValidationError, section: str) -> ConfigError:
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    key = ".".join([section, *(str(part) for part in first["loc"])])
    detail = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    value = first.get("input")
    if first["type"] == "missing":
        detail = "is required"
    elif isinstance(value, (str, int, float, bool)):
        detail += f" (got {value!r})"
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more)"
    return ConfigError(key, " ".join(detail.split()))
