"""The private MPS daemon: who wants one, that it runs and ends with the stack, and what is said when there is none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig, load_config
from gateway.errors import ConfigError
from gateway.stack import mps, mps_guard
from gateway.stack.settings import StackSettings, load_settings, services
from tests.gateway.stack.test_settings import GOOD, write
from tests.processes import ProcessGroup

FAKE = Path(__file__).with_name("fake_mps_control.py")
GONE_S = 10.0


def settings_with(directory: Path, target: object, drafter: object, **gateway: object) -> StackSettings:
    content: dict[str, Any] = {name: dict(value) if isinstance(value, dict) else value for name, value in GOOD.items()}
    content["target"]["device"] = target
    content["drafter"]["device"] = drafter
    content["gateway"] |= gateway
    return load_settings(write(directory, content))


@pytest.fixture
def control(tmp_path: Path) -> dict[str, str]:
    """An environment in which the fake control program is found, and nothing else of that name."""
    program = tmp_path / "bin" / mps_guard.CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE} "$@"\n')
    program.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    base = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_MPS")}
    return {
        **base,
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "TMPDIR": str(temporary),
        "FAKE_MPS": "work",
        "FAKE_MPS_PID": str(tmp_path / "pid"),
    }


def daemon_pid(env: dict[str, str]) -> int:
    return int(Path(env["FAKE_MPS_PID"]).read_text())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody reaps a test's orphans in a container


def until_gone(pid: int) -> None:
    end = time.monotonic() + GONE_S
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)  # it is nobody's child here


def left_behind(env: dict[str, str]) -> list[Path]:
    return list(Path(env["TMPDIR"]).iterdir())


def impatient_guard(directory: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A guard whose deadline is short."""
    text = Path(mps_guard.__file__).read_text()
    assert old in text
    (directory / "mps_guard.py").write_text(text.replace(old, new))
    monkeypatch.setattr(mps, "__file__", str(directory / "mps.py"))


@pytest.mark.parametrize(
    ("target", "drafter", "choice", "shared"),
    [
        ("cuda", "cuda", "auto", True),
        ("cuda:0", "cuda", "auto", True),
        ("cuda:1", "cuda:1", "auto", True),
        ("cuda:0", "cuda:1", "auto", False),
        ("cpu", "cpu", "auto", False),
        ("cuda", "cpu", "auto", False),
        ("cuda", "cuda", "off", False),
        ("cuda", "cuda", False, False),
    ],
)
def test_a_daemon_is_for_two_services_on_one_gpu(
    tmp_path: Path, target: str, drafter: str, choice: object, shared: bool
) -> None:
    settings = settings_with(tmp_path, target, drafter, mps=choice)
    assert mps.shares_gpu(settings) is shared
    assert load_config(settings.path).gateway.mps == ("auto" if choice == "auto" else "off")


@pytest.mark.parametrize(
    ("target", "pcp_size", "drafter", "shared"),
    [
        ("cuda", 2, "cuda:1", True),
        ("cuda:1", 4, "cuda:4", True),
        ("cuda", 2, "cuda:2", False),
        ("cuda:1", 2, "cuda", False),
        ("cpu", 2, "cuda:1", False),
    ],
)
def test_the_ranks_of_a_target_may_share_their_gpus_too(
    tmp_path: Path, target: str, pcp_size: int, drafter: str, shared: bool
) -> None:
    content = {name: dict(value) if isinstance(value, dict) else value for name, value in GOOD.items()}
    content["target"] |= {"device": target, "pcp_size": pcp_size}
    content["drafter"]["device"] = drafter
    assert mps.shares_gpu(load_settings(write(tmp_path, content))) is shared


def test_a_stack_without_drafter_needs_none(tmp_path: Path) -> None:
    content = {**GOOD, "target": {**GOOD["target"], "device": "cuda"}, "gateway": {**GOOD["gateway"], "drafter": None}}
    del content["drafter"]
    assert not mps.shares_gpu(load_settings(write(tmp_path, content)))


def test_a_choice_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.mps: "):
        mps.shares_gpu(settings_with(tmp_path, "cuda", "cuda", mps="on"))
    with pytest.raises(ConfigError, match=r"^gateway\.mps: "):
        load_config(tmp_path / "config.yaml")
    assert GatewayConfig().mps == "auto"


async def test_the_daemon_runs_while_the_stack_does(tmp_path: Path, control: dict[str, str]) -> None:
    settings, said = settings_with(tmp_path, "cuda", "cuda"), list[str]()
    async with mps.shared_gpu(settings, said.append, control) as env:
        assert sorted(env) == ["CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY"]
        assert len(left_behind(control)) == 1
        pid = daemon_pid(control)
        assert is_alive(pid)
        specs = {spec.name: spec.env for spec in services(settings, "model", env)}
        assert env.items() <= specs["target"].items()
        assert env.items() <= specs["drafter"].items()
        assert not set(env) & set(specs["gateway"])
    until_gone(pid)
    assert said == []
    assert left_behind(control) == []


async def test_a_daemon_that_does_not_quit_is_killed(
    tmp_path: Path, control: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient_guard(tmp_path, monkeypatch, "QUIT_S = 15.0", "QUIT_S = 0.5")
    async with mps.shared_gpu(settings_with(tmp_path, "cuda", "cuda"), print, {**control, "FAKE_MPS": "deaf"}):
        pid = daemon_pid(control)
    until_gone(pid)
    assert left_behind(control) == []


@pytest.mark.parametrize("mode", ["fail", "hang", "absent"])
async def test_without_a_daemon_the_stack_says_what_it_costs(
    tmp_path: Path, control: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient_guard(tmp_path, monkeypatch, "START_S = 20.0", "START_S = 1.0")
    path = "/usr/bin:/bin" if mode == "absent" else control["PATH"]
    said: list[str] = []
    async with mps.shared_gpu(
        settings_with(tmp_path, "cuda", "cuda"), said.append, {**control, "FAKE_MPS": mode, "PATH": path}
    ) as env:
        assert env == {}
    reason = {
        "fail": "nvidia-cuda-mps-control ended with status 1: cannot talk to the driver",
        "hang": "nvidia-cuda-mps-control did not answer within 1 s",
        "absent": "nvidia-cuda-mps-control is not installed",
    }[mode]
    assert said == [f"No MPS ({reason}): {mps.NO_MPS}"]
    assert left_behind(control) == []
    if mode == "hang":
        until_gone(daemon_pid(control))


async def test_a_daemon_of_the_users_own_is_left_alone(tmp_path: Path, control: dict[str, str]) -> None:
    base = {**control, "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}
    async with mps.shared_gpu(settings_with(tmp_path, "cuda", "cuda"), print, base) as env:
        assert env == {}
    assert left_behind(control) == []


HOLDER = """
import asyncio, sys
from pathlib import Path
from gateway.stack.mps import shared_gpu
from gateway.stack.settings import load_settings
async def main():
    async with shared_gpu(load_settings(Path(sys.argv[1])), print) as env:
        print("holds", len(env), flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


def test_the_daemon_ends_with_a_killed_supervisor(
    processes: ProcessGroup, tmp_path: Path, control: dict[str, str]
) -> None:
    settings = settings_with(tmp_path, "cuda", "cuda")
    env = {key: control[key] for key in ("PATH", "TMPDIR", "FAKE_MPS", "FAKE_MPS_PID")}
    holder = processes.python("-c", HOLDER, str(settings.path), env=env)
    holder.wait_for_line("^holds 2$")
    pid = daemon_pid(control)
    assert is_alive(pid)
    holder.kill()
    until_gone(pid)
    end = time.monotonic() + GONE_S
    while left_behind(control):
        assert time.monotonic() < end
        time.sleep(0.01)  # nor is the guard


def test_the_example_configs_of_one_gpu_want_a_daemon() -> None:
    root = Path(mps.__file__).parents[2]
    for path in sorted((root / "configs").glob("gpu*.yaml")):
        if yaml.safe_load(path.read_text()).get("drafter"):
            assert mps.shares_gpu(load_settings(path)), path
