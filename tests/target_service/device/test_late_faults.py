"""What goes wrong in the middle of a step: what it touched is not to be trusted, also where that is found late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import IntegrityError
from engine.outbox import Outbox
from target_service.device.runner import DeviceRunner
from target_service.device_thread import DeviceThread
from target_service.flights import Flight
from target_service.messages import FaultReply, ReleaseRequest, RowRequest, RowStatus, StepReply, StepRequest
from target_service.streams import GatewayStream
from tests.target_service.device.bench import Bench, Planner, Request, outputs_without_drafts


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Bench:
    return Bench(tiny_dir, "host", num_blocks=128)


def break_completion(bench: Bench, seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The completion of step `seq` meets a bug."""
    runner = bench.engine.device_runner
    assert isinstance(runner, DeviceRunner)
    complete: Callable[[Flight], StepReply] = runner.complete

    def broken(flight: Flight) -> StepReply:
        if flight.step.seq == seq:
            raise ValueError("wrong")
        return complete(flight)

    monkeypatch.setattr(runner, "complete", broken)


def test_a_lockstep_plan_that_waits_for_a_completion_that_fails(
    tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that it takes are gone when the plan goes on: nothing is reserved for them any more."""
    hit, other = Request("hit", [30, 31], 9), Request("other", [8, 9, 10], 9)
    expected = outputs_without_drafts(host, [other])
    bench = Bench(tiny_dir)
    planner = Planner(bench, 3)
    planner.place(hit)
    planner.place(other)
    planner.launch([other])
    planner.take()
    planner.launch([hit])
    break_completion(bench, 2, monkeypatch)
    planner.under_way.clear()
    planner.seq += 1
    rows = (RowRequest("hit", 1, 2, 1, 0, 0, True), RowRequest("other", 1, 3, 1, 0, 0, True))
    reply = bench.whole_step(StepRequest(planner.seq, "", 0, rows, 0, 100, ahead=0))
    assert [row.status for row in reply.rows] == [RowStatus.UNKNOWN, RowStatus.OK]
    assert [*other.generated, *reply.rows[1].token_ids] == expected["other"][:2]
    bench.release("other")
    bench.assert_free()


def test_a_row_that_waits_for_the_truth_of_a_completion_that_fails(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would starve by its bound, so the steps under way are completed first; one of them takes its request along."""
    bench = Bench(tiny_dir, num_blocks=3, prefix_caching=False)
    hit, holder = Request("hit", list(range(30, 45)), 30), Request("holder", list(range(60, 90)), 9)
    planner = Planner(bench, 4, chunk=64)
    planner.place(hit)
    planner.place(holder)
    planner.launch([holder])
    planner.take()
    planner.launch([hit])
    planner.launch([hit])  # by its bound the next row begins a second block, and there is none
    break_completion(bench, 2, monkeypatch)
    planner.under_way.clear()
    planner.seq += 1
    rows = (RowRequest("hit", 1, 16, 1, 0, 0, True),)
    reply = bench.whole_step(StepRequest(planner.seq, "", 0, rows, 0, 100, ahead=3))
    assert [row.status for row in reply.rows] == [RowStatus.UNKNOWN]
    bench.release("holder")
    bench.assert_free()


@pytest.mark.parametrize("execution", ["host", "device"])
def test_an_error_of_ours_in_the_middle_of_a_launch_takes_its_requests(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, execution: str
) -> None:
    """The seat's state may have moved on already, and the host not: a next step would run at the wrong place."""
    bench = Bench(tiny_dir, execution)
    request = Request("a", [30, 31], 9)
    planner = Planner(bench, 1)
    planner.place(request)
    planner.launch([request])
    planner.take()

    def broken(*arguments: Any, **named: Any) -> Any:
        raise IntegrityError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr("engine.request_blocks.RequestBlocks.register_written", broken)
        patched.setattr("target_service.device.frame.StepFrame.commit", broken)
        fault = bench.send(StepRequest(2, "", 0, (planner.row(request),), 0, 100, ahead=0))
    assert isinstance(fault, FaultReply)
    assert (fault.kind, fault.detail) == ("integrity", "no such luck")
    bench.assert_free()


def test_a_release_that_is_refused_is_not_remembered(tiny_dir: Path) -> None:
    """Else what comes after the hello would not be run, for the sake of a release that never was."""
    bench = Bench(tiny_dir)
    thread = DeviceThread(bench.core, 8, None, lambda: None, bench.engine.device)
    stream = GatewayStream(2, Outbox(8, on_overflow=lambda: None))
    release = ReleaseRequest("a", 1)
    assert thread.submit(stream, release)
    assert stream.withdrawn
    fault = bench.core.handle(stream, release)
    assert isinstance(fault, FaultReply)
    assert fault.detail.startswith("hello: must come first")
    assert not stream.withdrawn
