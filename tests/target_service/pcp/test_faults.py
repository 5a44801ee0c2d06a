"""A rank that dies or hangs ends the target as a whole, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.errors import ConfigError, RanksLost
from protos import common_pb2
from target_service.__main__ import main
from target_service.assembly import build_target
from target_service.config import TargetConfig
from target_service.pcp.__main__ import LOST_STATUS
from target_service.pcp.settings import CLOSE_S
from tests.processes import ProcessGroup, TestProcess
from tests.target_service.conftest import start_target, write_config
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.test_greedy import prompt_of

NOTICE_S = 2.0  # what is promised
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SHM = Path("/dev/shm")


def start(processes: ProcessGroup, tmp_path: Path, model: Path, **settings: Any) -> tuple[str, TestProcess]:
    config = write_config(tmp_path / "target.yaml", model, **{"pcp_size": 2, "drain_s": 1, **settings})
    return start_target(processes, config)


def ranks_of(process: TestProcess) -> list[psutil.Process]:
    """The target's other ranks."""
    return psutil.Process(process.pid).children(recursive=True)


def boards_of(process: TestProcess) -> list[Path]:
    return list(SHM.glob(f"outrider-{process.pid}-*"))


def when(holds: Callable[[], bool], deadline_s: float) -> float:
    """Seconds until it holds, looked at a hundred times a second: it happens in another process."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.01)
    return time.monotonic() - began


class Health:
    """Watches the target's health by the standard service."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.seen: list[tuple[float, int]] = []
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self.seen.append((time.monotonic(), answer.status))
        except grpc.RpcError:
            self.seen.append((time.monotonic(), NOT_SERVING))  # nobody answers any more

    def close(self) -> None:
        self._call.cancel()
        self._thread.join(10)
        self._channel.close()


def keep_busy(driver: Driver, requests: list[Running]) -> threading.Thread:
    """Steps without end, until the stream breaks."""

    def run() -> None:
        try:
            while True:
                driver.step(requests)
        except (AssertionError, Exception):  # the stream has ended, by whatever the target's end looks like from here
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def assert_said_in_lines(process: TestProcess) -> None:
    """That a rank was lost is said, and nothing of what that looks like to the library between the ranks."""
    assert "; ending the target\n" in process.output
    for word in ("Traceback", "Error", "gloo/"):
        assert word not in process.output


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_rank_ends_the_target(
    tmp_path: Path, tiny_dir: Path, processes: ProcessGroup, number: signal.Signals, busy: bool
) -> None:
    address, process = start(processes, tmp_path, tiny_dir)
    (rank,) = ranks_of(process)
    assert len(boards_of(process)) == 1
    health = Health(address)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        requests = [driver.request(prompt_of(20 + index), 400) for index in range(3)]
        for running in requests:
            driver.admit(running)
        driver.step(requests)
        thread = keep_busy(driver, requests) if busy else None
        if busy:
            when(lambda: len(requests[0].generated) > 3, 20)
        assert [status for _, status in health.seen] == [SERVING]
        began = time.monotonic()
        rank.send_signal(number)
        when(lambda: len(health.seen) > 1, NOTICE_S)
        assert health.seen[1][1] == NOT_SERVING
        assert process.popen.wait(10) == 1, process.output
        assert time.monotonic() - began < NOTICE_S + 5
        if thread is not None:
            thread.join(10)
            assert not thread.is_alive()
    health.close()
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert not boards_of(process)
    assert ("has ended" in process.output) == (number is signal.SIGKILL)
    assert "Fault" not in process.output
    assert_said_in_lines(process)


def test_of_several_ranks_only_the_lost_one_is_spoken_of(
    tmp_path: Path, tiny_dir: Path, processes: ProcessGroup
) -> None:
    """The others stand in collectives that it breaks, and may find out before rank 0 does."""
    address, process = start(processes, tmp_path, tiny_dir, pcp_size=4)
    ranks = ranks_of(process)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(20), 400)
        driver.admit(running)
        thread = keep_busy(driver, [running])
        when(lambda: len(running.generated) > 3, 20)
        ranks[1].kill()
        assert process.wait(10) == 1, process.output
        thread.join(10)
    psutil.wait_procs(ranks, timeout=5)
    assert f"rank 2 (process {ranks[1].pid}) has ended: signal 9; ending the target\n" in process.output
    assert_said_in_lines(process)


def test_ranks_die_with_rank_0(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    _, process = start(processes, tmp_path, tiny_dir)
    (rank,) = ranks_of(process)
    psutil.Process(process.pid).kill()
    process.popen.wait(10)
    psutil.wait_procs([rank], timeout=5)
    assert not rank.is_running()
    # Its board is left, unlocked, and goes with the next start of anything on this machine.
    start(processes, tmp_path, tiny_dir)
    assert not boards_of(process)


def test_a_stop_ends_all_ranks(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    address, process = start(processes, tmp_path, tiny_dir)
    (rank,) = ranks_of(process)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        driver.run([driver.request(prompt_of(9), 3)])
    began = time.monotonic()
    rank.send_signal(signal.SIGINT)  # a Ctrl-C reaches the whole group: rank 0 decides
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(20) == 0, process.output
    assert time.monotonic() - began < CLOSE_S + 5
    assert not rank.is_running()
    assert not boards_of(process)


def test_a_rank_out_of_step_ends_the_target(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    """Rank 1 finds that it is out of step, and ends; rank 0 sees it."""
    address, process = start(processes, tmp_path, tiny_dir)
    (board,) = boards_of(process)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(20), 10)
        driver.admit(running)
        gateway.send(plan=common_pb2.StepPlan(seq=1, rows=[driver.row(running)]))
        gateway.event("result")
        with board.open("r+b") as file:  # the counter of orders, moved on without one
            file.seek(64)
            file.write((2).to_bytes(8, "little"))
        assert process.wait(10) == 1, process.output
    assert "rank 1 is at step 2 and finds the order of step 0" in process.output
    assert f"has ended: exit status {LOST_STATUS}" in process.output


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pcp_backend": "nccl"}, "target.pcp_backend: nccl needs a GPU for each of the 2 ranks"),
        (
            {"execution": "device", "attention": "torch"},
            "target.execution: device needs an attention that asks the host for no lengths, not torch",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(tiny_dir: Path, settings: dict[str, str], complaint: str) -> None:
    config = TargetConfig.model_validate({"pcp_size": 2, **settings})
    with pytest.raises(ConfigError) as error:
        build_target(config, "tiny", tiny_dir)
    assert str(error.value) == complaint


def test_a_rank_that_cannot_start_ends_the_start(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    config = write_config(tmp_path / "target.yaml", tiny_dir, pcp_size=2, pcp_start_timeout_s=0.1)
    process = processes.python("-m", "target_service", "--config", str(config))
    assert process.wait(60) == 2
    assert "target_service: not all ranks were loaded within 0.1 s" in process.output
    assert not boards_of(process)


def test_a_target_that_cannot_listen_lets_its_ranks_go(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had joined already: the process must not end with a group that others are still in."""
    monkeypatch.setattr("target_service.__main__.StopSignal", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_config(tmp_path / "target.yaml", tiny_dir, pcp_size=2, listen=f"127.0.0.1:{port}")
        assert main(["--config", str(config)]) == 2
    assert not [child for child in psutil.Process().children() if "target_service.pcp" in child.cmdline()]
    assert not list(SHM.glob(f"outrider-{os.getpid()}-*"))


def test_a_bug_in_a_rank_ends_the_target(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    """However the rank's process takes its end: its heartbeat goes first."""
    address, process = start(processes, tmp_path, tiny_dir)
    (board,) = boards_of(process)
    health = Health(address)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(20), 10)
        driver.admit(running)
        gateway.send(plan=common_pb2.StepPlan(seq=1, rows=[driver.row(running)]))
        gateway.event("result")
        began = time.monotonic()
        with board.open("r+b") as file:
            file.seek(10 * 64)  # behind the words of two ranks: the first place of the ring
            file.write((2).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little"))  # an order of so many rows
            file.seek(64)
            file.write((2).to_bytes(8, "little"))
        when(lambda: len(health.seen) > 1, NOTICE_S)
        assert process.wait(10) == 1, process.output
        assert time.monotonic() - began < NOTICE_S + 5
    health.close()
    assert "ValueError" in process.output


BUG_IN_RANK_0 = """
import os, sys
from engine.decoder import Decoder
from target_service.__main__ import end_soon, main

def broken(*arguments, **named):
    raise {error}("no such luck")

Decoder.forward = broken
os._exit(main(sys.argv[1:], on_failure=end_soon))
"""


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
def test_a_bug_in_rank_0_ends_the_target(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup, error: str) -> None:
    """The other rank is in the middle of the step, and would wait in it for its end."""
    config = write_config(tmp_path / "target.yaml", tiny_dir, pcp_size=2, drain_s=1)
    process = processes.python("-c", BUG_IN_RANK_0.replace("{error}", error), "--config", str(config))
    address = process.wait_for_line(r"target ready on (\S+) ", 90).group(1)
    (rank,) = ranks_of(process)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(20), 10)
        driver.admit(running)
        gateway.send(plan=common_pb2.StepPlan(seq=1, rows=[driver.row(running)]))
        assert process.wait(10) == 1, process.output
    assert "step 1 over 2 ranks failed: no such luck" in process.output
    assert "in broken" in process.output  # whose fault it is stays to be seen
    psutil.wait_procs([rank], timeout=5)
    assert not rank.is_running()
    assert not boards_of(process)


def test_ranks_that_do_not_meet_end_the_start(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*arguments: Any) -> Any:
        raise RuntimeError("Connection closed by peer\nand a long trace")

    monkeypatch.setattr("target_service.pcp.ranks.TorchGroup", alone)
    config = TargetConfig.model_validate({"pcp_size": 2, "threads": 1, "num_blocks": 16})
    with pytest.raises(RanksLost, match=r"^the ranks did not meet: Connection closed by peer$"):
        build_target(config, "tiny", tiny_dir)
    assert not [child for child in psutil.Process().children() if "target_service.pcp" in child.cmdline()]
