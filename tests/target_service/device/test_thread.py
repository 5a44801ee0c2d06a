"""The thread that waits for steps under way while another one, which may be quicker, completes them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest
import torch

from target_service.channels import OpenChannel, TargetChannels
from target_service.device.marks import Marks
from target_service.device_thread import DeviceThread
from target_service.messages import ReleaseRequest, RowRequest, StepReply, StepRequest
from tests.target_service.device.bench import Bench, Request

WAIT_S = 10.0


class _Landing:
    """The device is done by the time that anyone asks. `watched`: the watcher has come to wait for it, which ends with
    `gate`.
    """

    def __init__(self, gate: threading.Event) -> None:
        self.watched = threading.Event()
        self._gate = gate

    def done(self) -> bool:
        self._finish()
        return True

    def wait(self) -> None:
        self._finish()
        if threading.current_thread().name == "device-watcher":
            self.watched.set()
            assert self._gate.wait(WAIT_S)

    @staticmethod
    def _finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class _NoChannels:
    def in_use(self) -> list[OpenChannel]:
        return []

    def close_retired(self) -> None:
        pass


def test_who_watches_does_not_wait_for_what_was_completed_meanwhile(tiny_dir: Path) -> None:
    """What it would wait on may be another step's by then, so that the steps in between were told of late."""
    bench = Bench(tiny_dir, channel_depth=4)
    runner = bench.engine.device_runner
    assert runner is not None
    bench.core.channels = cast(TargetChannels, _NoChannels())
    gates = [threading.Event() for _ in range(3)]
    landings: list[_Landing] = []

    def make_landing(marks: Marks) -> _Landing:
        landings.append(_Landing(gates[len(landings)]))
        return landings[-1]

    runner.make_landing = make_landing
    request = Request("a", [5, 6, 7], 30)
    bench.admit(request.admission())
    thread = DeviceThread(bench.core, 8, None, lambda: None, bench.engine.device)
    thread.start()
    try:
        for seq in (1, 2, 3):
            lens = (0, 3) if seq == 1 else (seq + 1, 1)
            row = RowRequest("a", 1, *lens, 0, 0, True)
            assert thread.submit(bench.stream, StepRequest(seq, "", 0, (row,), 0, 100, ahead=3))
            if seq == 1:
                assert landings_have(landings, 1)
        for seq in (1, 2):  # completed, as the third step came
            reply = bench.stream.outbox.take(WAIT_S)
            assert isinstance(reply, StepReply)
            assert reply.seq == seq
        gates[0].set()
        assert landings_have(landings, 3)
        assert [landing.watched.is_set() for landing in landings] == [True, False, True]
        gates[2].set()
        reply = bench.stream.outbox.take(WAIT_S)
        assert isinstance(reply, StepReply)
        assert reply.seq == 3
    finally:
        for gate in gates:
            gate.set()
        thread.stop(WAIT_S)


class _Stuck:
    """The device never comes back, or not before the test ends."""

    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._end.wait(WAIT_S)


@pytest.mark.parametrize("depth", [4, 1])
def test_a_device_that_never_comes_back_is_lost(tiny_dir: Path, depth: int) -> None:
    """Found by whoever only waits for the step, and where the device thread itself waits, in completing the step before
    it launches another. Both stay stuck, and what is asked for meanwhile waits for nobody.
    """
    bench = Bench(tiny_dir, channel_depth=4)
    runner = bench.engine.device_runner
    assert runner is not None
    runner.max_in_flight = depth
    bench.core.channels = cast(TargetChannels, _NoChannels())
    end, failed = threading.Event(), threading.Event()
    runner.make_landing = lambda marks: _Stuck(end)
    bench.admit(Request("a", [5, 6, 7], 30).admission())
    thread = DeviceThread(bench.core, 8, None, failed.set, bench.engine.device, deadline_s=2.0)
    thread.start()
    try:
        for seq in (1, 2):
            row = RowRequest("a", 1, *((0, 3) if seq == 1 else (4, 1)), 0, 0, True)
            assert thread.submit(bench.stream, StepRequest(seq, "", 0, (row,), 0, 100, ahead=3))
        assert failed.wait(WAIT_S)
        assert thread.lost.endswith("is not done after 2 s")
        assert not thread.submit(bench.stream, ReleaseRequest("a", 1))
    finally:
        end.set()
        thread.stop(WAIT_S)


def test_a_device_that_takes_its_time_is_not_lost(tiny_dir: Path) -> None:
    """Each step has the whole time, from when the one before it was done."""
    bench = Bench(tiny_dir, channel_depth=4)
    runner = bench.engine.device_runner
    assert runner is not None
    bench.core.channels = cast(TargetChannels, _NoChannels())

    class Slow(_Stuck):
        def wait(self) -> None:
            threading.Event().wait(0.6)

    runner.make_landing = lambda marks: Slow(threading.Event())
    bench.admit(Request("a", [5, 6, 7], 30).admission())
    thread = DeviceThread(bench.core, 8, None, lambda: None, bench.engine.device, deadline_s=2.0)
    thread.start()
    try:
        for seq in range(1, 5):
            row = RowRequest("a", 1, *((0, 3) if seq == 1 else (seq + 2, 1)), 0, 0, True)
            assert thread.submit(bench.stream, StepRequest(seq, "", 0, (row,), 0, 100, ahead=3))
        for seq in range(1, 5):
            reply = bench.stream.outbox.take(WAIT_S)
            assert isinstance(reply, StepReply)
            assert reply.seq == seq
        assert thread.lost == ""
    finally:
        thread.stop(WAIT_S)


def landings_have(landings: list[_Landing], count: int) -> bool:
    """Whether the watcher comes to landing number `count`, in time."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if len(landings) >= count and landings[count - 1].watched.is_set():
            return True
        pause.wait(0.01)
    return False
