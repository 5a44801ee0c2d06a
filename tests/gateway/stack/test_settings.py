"""What the supervisor reads from a config file, and how it says what is wrong with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter_service.config import DrafterConfig
from gateway.config import GatewayConfig, parse_address
from gateway.errors import ConfigError
from gateway.stack import settings as stack
from target_service.config import TargetConfig

GOOD: dict[str, Any] = {
    "model": "some/model",
    "target": {"listen": "127.0.0.1:5001"},
    "drafter": {"listen": "127.0.0.1:5002", "method": "ngram"},
    "gateway": {
        "rest": "127.0.0.1:5003",
        "grpc": "127.0.0.1:5004",
        "target": "127.0.0.1:5001",
        "drafter": "127.0.0.1:5002",
    },
}


def write(directory: Path, content: Any) -> Path:
    path = directory / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_reads_addresses_and_builds_commands(tmp_path: Path) -> None:
    settings = stack.load_settings(write(tmp_path, GOOD))
    specs = stack.services(settings, "/models/some")
    assert [spec.name for spec in specs] == ["target", "drafter", "gateway"]
    assert [spec.grpc for spec in specs] == ["127.0.0.1:5001", "127.0.0.1:5002", "127.0.0.1:5004"]
    assert specs[0].argv[1:] == ("-m", "target_service", "--config", str(settings.path), "--model", "/models/some")
    without = {**GOOD, "gateway": {**GOOD["gateway"], "drafter": None}}
    del without["drafter"]
    settings = stack.load_settings(write(tmp_path, without))
    assert [spec.name for spec in stack.services(settings, "m")] == ["target", "gateway"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("[]", "config.yaml"),
        ("a: [", "config.yaml"),
        ({"tarjet": {}}, "tarjet"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"target": []}, "target"),
        ({"target": {"listen": "nowhere"}}, "target.listen"),
        ({"target": {"listen": 5}}, "target.listen"),
        ({"target": {"listen": "127.0.0.1:0"}}, "target.listen"),
        ({"target": {"listen": "127.0.0.1:70000"}}, "target.listen"),
        ({"target": {"listen": "127.0.0.1:5009"}}, "gateway.target"),
        ({"drafter": None}, "gateway.drafter"),
        ({"gateway": {**GOOD["gateway"], "drafter": None}}, "gateway.drafter"),
        ({"gateway": {**GOOD["gateway"], "rest": "127.0.0.1:5004"}}, "gateway.grpc"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, change: Any, key: str) -> None:
    path = write(tmp_path, {**GOOD, **change} if isinstance(change, dict) else change)
    with pytest.raises(ConfigError) as caught:
        stack.load_settings(path)
    assert caught.value.key.endswith(key)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        stack.load_settings(tmp_path / "nothing.yaml")


def test_free_ports_leave_everything_else_as_it_was(tmp_path: Path) -> None:
    settings = stack.load_settings(write(tmp_path, GOOD))
    moved = stack.with_free_ports(settings, tmp_path / "moved.yaml")
    assert len(set(moved.addresses().values()) | set(settings.addresses().values())) == 8
    assert moved.content["drafter"]["method"] == "ngram"
    assert moved.content["gateway"]["target"] == moved.target
    assert moved.content["gateway"]["drafter"] == moved.drafter
    assert settings.content == GOOD
    stack.check_ports(moved)


def test_a_taken_port_is_named_by_its_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        rest = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = stack.load_settings(write(tmp_path, {**GOOD, "gateway": {**GOOD["gateway"], "rest": rest}}))
        with pytest.raises(ConfigError, match=r"gateway\.rest: cannot listen on .*: Address already in use"):
            stack.check_ports(settings)


@pytest.mark.parametrize("path", [None, *sorted((stack.ROOT / "configs").glob("*.yaml"))], ids=str)
def test_no_service_listens_where_outgoing_connections_do(tmp_path: Path, path: Path | None) -> None:
    """From 32768 on Linux gives ports to outgoing connections: a start would fail now and then."""
    defaults: dict[str, Any] = {"model": "m", "drafter": {}, "gateway": {"drafter": DrafterConfig().listen}}
    settings = stack.load_settings(path or write(tmp_path, defaults))
    assert all(parse_address(text).port < 32768 for text in settings.addresses().values())
    if path is None:
        assert settings.target == TargetConfig().listen == GatewayConfig().target
        assert (settings.rest, settings.grpc) == (GatewayConfig().rest, GatewayConfig().grpc)


def test_what_the_user_has_set_stays() -> None:
    assert stack.service_environment("target", {"OMP_NUM_THREADS": "3"}).get("OMP_NUM_THREADS") is None
    assert stack.service_environment("target", {})["OMP_NUM_THREADS"] == str(stack.available_cores())
    assert stack.service_environment("gateway", {})["OMP_NUM_THREADS"] == "1"
    assert stack.service_environment("drafter", {})["OMP_WAIT_POLICY"] == "PASSIVE"
    path = stack.service_environment("target", {"PYTHONPATH": "/mine"})["PYTHONPATH"]
    assert path.split(os.pathsep) == ["/mine", str(stack.ROOT)]


def test_an_address_of_all_interfaces_is_reached_on_this_one() -> None:
    assert stack.url("0.0.0.0:80") == "http://127.0.0.1:80"
    assert stack.url("[::]:80") == "http://[::1]:80"


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert stack.available_cores(quota) == allowed
    for text, cores in (
        ("max 100000", allowed),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", allowed),
    ):
        quota.write_text(text + "\n")
        assert stack.available_cores(quota) == cores
