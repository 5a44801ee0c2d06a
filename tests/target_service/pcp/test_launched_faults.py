"""A rank that is lost while steps are under way ends the target in time, and nothing waits for a stream that may stand
for ever.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from engine.errors import RanksLost
from target_service.__main__ import main
from target_service.assembly import Target, build_target
from target_service.pcp.ranks import Ranks
from tests.processes import ProcessGroup, TestProcess
from tests.target_service.conftest import EXECUTIONS, write_config
from tests.target_service.device.bench import Bench, Planner, Request
from tests.target_service.gateway_client import Driver, Gateway
from tests.target_service.pcp.test_faults import (
    NOT_SERVING,
    NOTICE_S,
    Health,
    assert_said_in_lines,
    boards_of,
    ranks_of,
    start,
    when,
)
from tests.target_service.test_greedy import prompt_of
from tests.target_service.test_run_ahead import Ahead


def lose_a_rank(process: TestProcess, address: str, number: signal.Signals) -> None:
    """Send a rank the signal while steps are under way; the target has to end, in time."""
    (rank,) = ranks_of(process)
    health = Health(address)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(40), 400)
        driver.admit(running)
        ahead = Ahead(driver, running, 3)

        def keep_busy() -> None:
            with contextlib.suppress(AssertionError, Exception):  # the stream ends, by whatever it looks like from here
                ahead.run()

        thread = threading.Thread(target=keep_busy, daemon=True)
        thread.start()
        when(lambda: len(running.generated) > 3, 20)
        began = time.monotonic()
        rank.send_signal(number)
        when(lambda: len(health.seen) > 1, NOTICE_S)
        assert health.seen[1][1] == NOT_SERVING
        assert process.popen.wait(10) == 1, process.output
        assert time.monotonic() - began < NOTICE_S + 5
        thread.join(10)
        assert not thread.is_alive()
        assert not running.done
    health.close()
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert not boards_of(process)
    assert "Fault" not in process.output
    assert_said_in_lines(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_rank_ends_the_target_with_steps_under_way(
    tmp_path: Path, tiny_dir: Path, processes: ProcessGroup, number: signal.Signals
) -> None:
    """Rank 0 stands in a collective, or is about to."""
    address, process = start(processes, tmp_path, tiny_dir, **EXECUTIONS["device"])
    lose_a_rank(process, address, number)


@pytest.mark.parametrize(("error", "waits"), [(RanksLost("a rank is gone"), 0), (ValueError("a bug"), 1)])
def test_a_launch_that_lost_the_ranks_waits_for_no_stream(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, waits: int
) -> None:
    """Any other error waits: what was enqueued reads memory that is about to be used again."""
    bench = Bench(tiny_dir)
    runner = bench.engine.device_runner
    assert runner is not None
    waited: list[int] = []

    def fails(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(runner, "_quiesce", lambda: waited.append(1))
    monkeypatch.setattr(runner.forward, "ragged", fails)
    planner = Planner(bench, 1)
    request = Request("r", list(range(30, 40)), 4)
    planner.place(request)
    with pytest.raises(RanksLost if not waits else AssertionError):
        planner.launch([request])
    assert len(waited) == waits


def test_ranks_lost_in_an_idle_moment_are_not_passed_over(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors of a job that only was to save time are."""
    bench = Bench(tiny_dir)
    runner = bench.engine.device_runner
    assert runner is not None
    assert bench.channel is not None
    errors: list[Exception] = [ValueError("a bug"), RanksLost("a rank is gone")]

    def job() -> None:
        raise errors.pop(0)

    monkeypatch.setattr(runner, "_device", torch.device("cuda"))
    monkeypatch.setattr(runner, "warm_up_jobs", lambda *arguments: iter([job]))
    assert runner.idle([bench.channel])
    runner._warm.clear()
    with pytest.raises(RanksLost):
        runner.idle([bench.channel])


def test_a_rank_lost_while_warming_up_ends_the_start(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run over ranks before the service listens: its end must be on its way then, whatever it stands in."""
    watched: list[Callable[[], object]] = []
    ended: list[str] = []
    ranks = SimpleNamespace(watch=watched.append, close=lambda: ended.append("ranks"))

    def build(*arguments: Any) -> Target:
        target = build_target(*arguments)
        return replace(target, engine=replace(target.engine, ranks=cast(Ranks, ranks)))

    def lose(*arguments: Any) -> None:
        watched[0]()
        assert ended == ["soon"]
        raise RanksLost("a rank is gone")

    monkeypatch.setattr("target_service.__main__.StopSignal", lambda: SimpleNamespace(ask=lambda: None))
    monkeypatch.setattr("target_service.__main__.build_target", build)
    monkeypatch.setattr("target_service.__main__.warm_up", lose)
    config = write_config(tiny_dir.parent / "lost.yaml", tiny_dir)
    assert main(["--config", str(config)], on_failure=lambda: ended.append("soon")) == 1
    assert ended == ["soon", "ranks"]
