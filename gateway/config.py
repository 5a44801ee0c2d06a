"""Which settings does the gateway take, and what is wrong with a given file?

Reads the `gateway` section (and the top-level `model`) of the one config file that all services share. Every fault is a
ConfigError naming the dotted key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gateway.errors import ConfigError

TOP_LEVEL_KEYS = frozenset({"model", "target", "drafter", "gateway"})


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT, apart."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """`HOST:PORT` or `[V6]:PORT`. Raises ValueError with what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT, got {text!r}")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _checked_address(text: str) -> str:
    parse_address(text)
    return text


def _unquoted_off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


AddressText = Annotated[str, AfterValidator(_checked_address)]


class GatewayConfig(BaseModel):
    """The `gateway` section. Times are seconds unless the key says milliseconds.

    rest, grpc: where to listen. target, drafter: where the services are; drafter null: never draft.
    draft_len: default per request; max_draft_len: the most that a request may ask for; more is refused.
    max_step_tokens: prompt and decode tokens in one plan, at most the target's own limit; null: the target's.
    max_running: requests placed on the target at once; null: its seats. max_waiting: bound of the queue behind them.
    queue_timeout_s: longest wait to be started. target_wait_s: how long requests outlive a lost target.
    depth: plans under way at once; 1: lockstep, each is made after the verdict before it; more: run-ahead.
    step_deadline_ms: how long the services wait for each other inside a step. step_timeout_s: a target that answers no
    step within it is taken for lost. drain_s: how long running requests may go on after SIGTERM. model_name: what
    /v1/models says; null: the last part of `model`. max_queued_commands: unsent commands after which a service that
    does not read is taken for lost. reconnect_min_s, reconnect_max_s: pauses between attempts to reach a service.
    mps: read by `outrider up`; auto: target and drafter on one GPU get a private MPS daemon; off: they never do.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rest: AddressText = "127.0.0.1:8000"
    grpc: AddressText = "127.0.0.1:25050"
    target: AddressText = "127.0.0.1:25051"
    drafter: AddressText | None = None
    draft_len: int = Field(default=4, ge=0)
    max_draft_len: int = Field(default=7, ge=0, le=64)
    max_step_tokens: int | None = Field(default=None, ge=1)
    max_running: int | None = Field(default=None, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    queue_timeout_s: float = Field(default=120.0, gt=0)
    target_wait_s: float = Field(default=60.0, ge=0)
    depth: int = Field(default=1, ge=1, le=4)
    step_deadline_ms: int = Field(default=1000, ge=1)
    step_timeout_s: float = Field(default=60.0, gt=0)
    drain_s: float = Field(default=5.0, ge=0)
    model_name: str | None = Field(default=None, min_length=1)
    max_queued_commands: int = Field(default=1024, ge=16)
    reconnect_min_s: float = Field(default=0.05, gt=0)
    reconnect_max_s: float = Field(default=1.0, gt=0)
    mps: Annotated[Literal["auto", "off"], BeforeValidator(_unquoted_off)] = "auto"

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        if self.draft_len > self.max_draft_len:
            raise ValueError(f"draft_len: {self.draft_len} is above max_draft_len ({self.max_draft_len})")
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError("reconnect_min_s: must not be above reconnect_max_s")
        return self


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The gateway's settings and the model they serve.

    model: directory or name, the override before what the file says. model_label: what it is called: what the file
    says, if it says anything.
    """

    gateway: GatewayConfig
    model: str
    model_label: str


def load_config(path: str | Path, model_override: str | None = None) -> LoadedConfig:
    """Read and check `path`. Raises ConfigError naming the key (or the file) at fault."""
    try:
        raw: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "cannot be read") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(str(path), "must be a mapping with the keys model, target, drafter, gateway")
    for key in raw:
        if key not in TOP_LEVEL_KEYS:
            raise ConfigError(str(key), f"unknown key; known are {', '.join(sorted(TOP_LEVEL_KEYS))}")
    label = raw.get("model", model_override)
    if not isinstance(label, str) or not label:
        raise ConfigError("model", "must name a model directory or a model")
    section = raw.get("gateway")
    return LoadedConfig(gateway_section({} if section is None else section), model_override or label, label)


def gateway_section(section: Any) -> GatewayConfig:
    """The `gateway` section as it was read. Raises ConfigError naming the key."""
    if not isinstance(section, dict):
        raise ConfigError("gateway", "must be a mapping")
    try:
        return GatewayConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        detail = first["msg"].removeprefix("Value error, ")
        location = ".".join(str(part) for part in first["loc"])
        if not location:  # a check over two settings: its text starts with the key
            location, _, detail = detail.partition(": ")
        if first["type"] == "extra_forbidden":
            detail = f"unknown key; known are {', '.join(sorted(GatewayConfig.model_fields))}"
        raise ConfigError(f"gateway.{location}", detail) from error
