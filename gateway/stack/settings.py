"""Which services does a config file ask for, where do they listen, and in which environment do they run?

Reads of the services' sections only what a supervisor needs; `stack.checking` has the services check the rest.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from gateway.config import TOP_LEVEL_KEYS, Address, gateway_section, parse_address
from gateway.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
NAMES = ("target", "drafter", "gateway")  # the order of starting; stopping goes backwards


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to run. grpc: its gRPC address, whose health service tells when it is ready. env: added to ours."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    grpc: str


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What a config file asks for. drafter: None where no drafter runs. content: the file as it was read."""

    path: Path
    model: str
    target: str
    drafter: str | None
    rest: str
    grpc: str
    content: Mapping[str, Any]

    def addresses(self) -> dict[str, str]:
        """Every address that is listened on, by its key in the file."""
        found = {"target.listen": self.target, "gateway.rest": self.rest, "gateway.grpc": self.grpc}
        if self.drafter is not None:
            found["drafter.listen"] = self.drafter
        return found


def load_settings(path: Path) -> StackSettings:
    """Read `path`. Raises ConfigError naming the key."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must be a mapping with the keys model, target, drafter, gateway")
    for key in content:
        if key not in TOP_LEVEL_KEYS:
            raise ConfigError(str(key), f"unknown key; known are {', '.join(sorted(TOP_LEVEL_KEYS))}")
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("model", "must name a model directory or a model")
    target, gateway = _section(content, "target"), _section(content, "gateway")
    drafter = _section(content, "drafter") if content.get("drafter") is not None else None
    settings = StackSettings(
        path=path,
        model=model,
        target=_address(target, "target", "listen", "127.0.0.1:25051"),
        drafter=None if drafter is None else _address(drafter, "drafter", "listen", "127.0.0.1:25052"),
        rest=_address(gateway, "gateway", "rest", "127.0.0.1:8000"),
        grpc=_address(gateway, "gateway", "grpc", "127.0.0.1:25050"),
        content=content,
    )
    _check_agreement(settings, gateway)
    gateway_section(gateway)
    return settings


def with_free_ports(settings: StackSettings, path: Path) -> StackSettings:
    """The same stack on free ports of 127.0.0.1, written to `path`."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(4)]
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.content.items()}
    drafter = None if settings.drafter is None else ports[1]
    content["target"] = {**(content.get("target") or {}), "listen": ports[0]}
    content["gateway"] = {
        **(content.get("gateway") or {}),
        "rest": ports[2],
        "grpc": ports[3],
        "target": ports[0],
        "drafter": drafter,
    }
    if drafter is not None:
        content["drafter"] = {**content["drafter"], "listen": drafter}
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_settings(path)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on right now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for entry in sockets:
            entry.bind(("127.0.0.1", 0))
        return [int(entry.getsockname()[1]) for entry in sockets]
    finally:
        for entry in sockets:
            entry.close()


def check_ports(settings: StackSettings) -> None:
    """Raises ConfigError naming the key of an address that cannot be listened on now, before anything is started."""
    for key, text in settings.addresses().items():
        address = parse_address(text)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, address.port))
                probe.listen(1)
            except OSError as error:
                raise ConfigError(key, f"cannot listen on {text}: {error.strerror}") from error


def services(
    settings: StackSettings, model_directory: str, gpu_environment: Mapping[str, str] = MappingProxyType({})
) -> list[ServiceSpec]:
    """The processes of the stack, in starting order. gpu_environment: for those that use a GPU (`mps.shared_gpu`)."""
    modules = {"target": "target_service", "drafter": "drafter_service", "gateway": "gateway"}
    addresses = {"target": settings.target, "drafter": settings.drafter, "gateway": settings.grpc}
    return [
        ServiceSpec(
            name,
            (sys.executable, "-m", modules[name], "--config", str(settings.path), "--model", model_directory),
            service_environment(name) | ({} if name == "gateway" else dict(gpu_environment)),
            address,
        )
        for name in NAMES
        if (address := addresses[name]) is not None
    ]


def service_environment(name: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a service's environment has beyond ours. Whatever the user has set stays.

    Target and drafter take turns, so each may use all cores; but the drafter's idle threads must not spin on the
    cores that the target's forward needs meanwhile. The gateway computes nothing.
    """
    cores = available_cores()
    wanted = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == "gateway":
        wanted["OMP_NUM_THREADS"] = "1"
    else:
        wanted["OMP_NUM_THREADS"] = str(cores)
    if name == "drafter":
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    added = {key: value for key, value in wanted.items() if key not in base}
    path = base.get("PYTHONPATH", "")
    if str(ROOT) not in path.split(os.pathsep):  # a checkout that is not installed
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(ROOT)]))
    return added


def available_cores(quota_file: Path = CPU_QUOTA) -> int:
    """CPU cores this process may use: those it is allowed on, or a container's quota if less (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        pass
    return max(1, cores)


def reachable(text: str) -> Address:
    """Where a client on this machine finds a service that listens on `text`: 0.0.0.0 and [::] are no destinations."""
    address = parse_address(text)
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return Address(loopback.get(address.host, address.host), address.port)


def url(text: str) -> str:
    """The HTTP URL of a service that listens on `text`."""
    address = reachable(text)
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{address.port}"


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(name, "must be a mapping")
    return section


def _address(section: Mapping[str, Any], name: str, key: str, default: str) -> str:
    text = section.get(key, default)
    try:
        address = parse_address(text)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{name}.{key}", f"must be HOST:PORT, got {text!r}") from error
    if address.port == 0:
        raise ConfigError(f"{name}.{key}", "needs a port of its own here: the services have to find each other")
    return str(text)


def _check_agreement(settings: StackSettings, gateway: Mapping[str, Any]) -> None:
    """The gateway has to look for the services where they listen."""
    for key, listen in (("target", settings.target), ("drafter", settings.drafter)):
        told = gateway.get(key, "127.0.0.1:25051" if key == "target" else None)
        if told is not None and listen is None:
            raise ConfigError(f"gateway.{key}", f"is set, but the file has no {key} section")
        if listen is not None and (told is None or parse_address(str(told)).port != parse_address(listen).port):
            raise ConfigError(f"gateway.{key}", f"is {told}, but {key}.listen is {listen}")
    listening = list(settings.addresses().items())
    for index, (key, text) in enumerate(listening):
        for other, other_text in listening[:index]:
            if text == other_text:
                raise ConfigError(key, f"is {text}, and so is {other}")
