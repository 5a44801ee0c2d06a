"""The supervisor with dummy services: ready, restarted, stopped in order, killed when deaf, and never orphaned."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from gateway.supervisor import ServiceState, StartFailed, Supervisor, SupervisorLimits
from tests.gateway.stack.dummies import Seen, spec
from tests.ports import ReservedPort
from tests.processes import ROOT, ProcessGroup

FAST = SupervisorLimits(start_s=20, stop_s=5, first_backoff_s=0.05, last_backoff_s=0.2, poll_s=0.02)


def gone(pid: int) -> bool:
    """No such process, or one that only waits for its parent to take note."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int, deadline_s: float = 10) -> None:
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=deadline_s)
    assert gone(pid)


async def test_starts_all_hands_over_lines_and_stops_the_gateway_first(reserve_port: type[ReservedPort]) -> None:
    seen = Seen()
    specs = [spec(name, reserve_port().address) for name in ("target", "drafter", "gateway")]
    async with Supervisor(specs, seen.on_line, seen.on_state, FAST) as supervisor:
        await supervisor.wait_ready()
        pids = [supervisor.pid(name) for name in ("target", "drafter", "gateway")]
        assert all(pid is not None and not gone(pid) for pid in pids)
    assert all(pid is not None and gone(pid) for pid in pids)
    for name in ("target", "drafter", "gateway"):
        assert [line for who, line in seen.lines if who == name] == [
            "hello from stdout",
            "hello from stderr \U0001f642",
            "ready",
            "goodbye",
        ]
    stopped = [name for name, state in seen.states if state is ServiceState.STOPPED]
    assert stopped[0] == "gateway"
    assert sorted(stopped) == ["drafter", "gateway", "target"]


async def test_a_service_that_cannot_start_ends_the_start_with_its_last_words(
    reserve_port: type[ReservedPort],
) -> None:
    seen = Seen()
    specs = [spec("target", reserve_port().address), spec("gateway", reserve_port().address, "--fail")]
    async with Supervisor(specs, seen.on_line, seen.on_state, FAST) as supervisor:
        with pytest.raises(StartFailed, match=r"gateway: ended before it was ready \(exit status 3\)") as caught:
            await supervisor.wait_ready()
    assert caught.value.last_lines[-1] == "config.key: is wrong"


async def test_a_service_that_refuses_its_config_is_quoted_and_nobody_waits_for_one_that_loads(
    reserve_port: type[ReservedPort],
) -> None:
    seen = Seen()
    limits = SupervisorLimits(start_s=20, stop_s=60, stop_unready_s=0.2, poll_s=0.02)
    specs = [spec("drafter", reserve_port().address, "--slow")]
    async with Supervisor(specs, seen.on_line, seen.on_state, limits) as supervisor:
        await seen.until(lambda: ("drafter", "loading") in seen.lines)
        began = time.monotonic()
        await supervisor.stop()
        assert time.monotonic() - began < 30
    specs = [spec("target", reserve_port().address, "--refuse")]
    async with Supervisor(specs, seen.on_line, seen.on_state, limits) as supervisor:
        with pytest.raises(StartFailed) as caught:
            await supervisor.wait_ready()
    assert str(caught.value) == "target: cannot start: target.num_bloks: unknown key"


async def test_a_service_that_is_never_ready_is_named(reserve_port: type[ReservedPort]) -> None:
    seen = Seen()
    limits = SupervisorLimits(start_s=1.5, stop_s=5, poll_s=0.02, probe_s=0.2)
    silent = spec("target", reserve_port().address)
    elsewhere = type(silent)(silent.name, silent.argv, silent.env, reserve_port().address)
    async with Supervisor([elsewhere], seen.on_line, seen.on_state, limits) as supervisor:
        with pytest.raises(StartFailed, match="target: not ready within"):
            await supervisor.wait_ready()


@pytest.mark.parametrize("how", ["kill", "crash"])
async def test_a_service_that_dies_is_started_again(reserve_port: type[ReservedPort], tmp_path: Path, how: str) -> None:
    seen = Seen()
    crash = tmp_path / "crash"
    specs = [
        spec("target", reserve_port().address, "--crash-file", str(crash)),
        spec("gateway", reserve_port().address),
    ]
    async with Supervisor(specs, seen.on_line, seen.on_state, FAST) as supervisor:
        await supervisor.wait_ready()
        other = supervisor.pid("gateway")
        for time_round in range(2):
            pid = supervisor.pid("target")
            assert pid is not None
            if how == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                crash.touch()
            await seen.until(lambda: Counter(seen.states)["target", ServiceState.READY] == time_round + 2)  # noqa: B023
            assert supervisor.pid("target") not in (pid, None)
        assert supervisor.pid("gateway") == other
        assert Counter(seen.states)["target", ServiceState.RESTARTING] == 2
        assert Counter(seen.states)["gateway", ServiceState.RESTARTING] == 0


async def test_the_pause_grows_while_a_service_keeps_dying(reserve_port: type[ReservedPort], tmp_path: Path) -> None:
    seen = Seen()
    details: list[str] = []
    crash = tmp_path / "crash"

    def on_state(name: str, state: ServiceState, detail: str) -> None:
        seen.on_state(name, state, detail)
        if state is ServiceState.RESTARTING:
            details.append(detail)
        if state is ServiceState.READY:
            crash.touch()

    specs = [spec("target", reserve_port().address, "--crash-file", str(crash))]
    limits = SupervisorLimits(start_s=20, first_backoff_s=0.1, last_backoff_s=0.3, poll_s=0.02)
    async with Supervisor(specs, seen.on_line, on_state, limits) as supervisor:
        await supervisor.wait_ready()
        await seen.until(lambda: len(details) >= 4)
    assert details[:4] == [f"exit status 7; again in {pause} s" for pause in (0.1, 0.2, 0.3, 0.3)]


async def test_a_deaf_service_and_its_children_are_killed(reserve_port: type[ReservedPort], tmp_path: Path) -> None:
    seen = Seen()
    child = tmp_path / "child"
    specs = [spec("target", reserve_port().address, "--deaf", "--child", str(child))]
    limits = SupervisorLimits(start_s=20, stop_s=0.3, poll_s=0.02)
    async with Supervisor(specs, seen.on_line, seen.on_state, limits) as supervisor:
        await supervisor.wait_ready()
        pid = supervisor.pid("target")
        began = time.monotonic()
    assert pid is not None
    assert gone(pid)
    wait_gone(int(child.read_text()))
    assert 0.3 <= time.monotonic() - began < 5


SCRIPT = """
import asyncio, signal, sys
from gateway.supervisor import Supervisor
from tests.gateway.stack.dummies import spec

async def main():
    specs = [spec(name, address, *sys.argv[3:]) for name, address in zip(("target", "gateway"), sys.argv[1:3])]
    printed = lambda name, line: print(name, line, flush=True)
    async with Supervisor(specs, printed, lambda *_: None) as supervisor:
        await supervisor.wait_ready()
        print("pids", supervisor.pid("target"), supervisor.pid("gateway"), flush=True)
        await supervisor.run()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(PR_SET_PDEATHSIG) is Linux's")
def test_no_service_outlives_a_supervisor_that_is_killed(
    processes: ProcessGroup, reserve_port: type[ReservedPort]
) -> None:
    supervisor = processes.python("-c", SCRIPT, reserve_port().address, reserve_port().address, "--deaf")
    pids = [int(pid) for pid in supervisor.wait_for_line(r"^pids (\d+) (\d+)").groups()]
    assert not any(map(gone, pids))
    supervisor.kill()
    for pid in pids:
        wait_gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(PR_SET_PDEATHSIG) is Linux's")
def test_a_leash_without_its_holder_starts_nothing(processes: ProcessGroup) -> None:
    leash = ROOT / "gateway" / "stack" / "leash.py"
    orphan = processes.python(str(leash), "1", sys.executable, "-c", "print('ran')")
    assert orphan.wait() == 1
    assert "ran" not in orphan.output
    held = processes.python(str(leash), str(os.getpid()), sys.executable, "-c", "print('ran')")
    assert held.wait() == 0
    assert held.output == "ran\n"
