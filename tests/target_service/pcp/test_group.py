"""torch.distributed between real processes: what is gathered, and that no collective waits for ever."""

from __future__ import annotations

import time

import pytest
import torch

from target_service.pcp.group import Stopwatch, choose_backend, rank_device, rendezvous
from tests.processes import ProcessGroup, TestProcess

RANK = """
import sys, threading, time, torch
from target_service.pcp.group import TorchGroup
rank, port, absent, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "absent", float(sys.argv[4])
group = TorchGroup(rank, 2, "gloo", port, torch.device("cpu"), 60, timeout_s)
print("joined", flush=True)
if absent and rank == 1:
    time.sleep(60)
with torch.inference_mode():
    out = torch.empty(4, 3)
    pending = group.start_all_gather(out, torch.full((2, 3), float(rank + 1)))
    pending.wait()
    assert out[:, 0].tolist() == [1, 1, 2, 2], out
    rows = group.gather(torch.full((2, 2), float(rank)))
    assert (rows is None) == (rank == 1)
    assert rows is None or rows[:, 1].tolist() == [0, 0, 1, 1]
words = torch.arange(5) * (2 - rank)  # rank 0's reaches rank 1, in place
group.broadcast(words)
assert words.tolist() == [0, 2, 4, 6, 8], words
group.close()
print("done", flush=True)
"""


def start(processes: ProcessGroup, *arguments: str) -> tuple[object, TestProcess, TestProcess]:
    store = rendezvous(2, 60)
    first, second = (processes.python("-c", RANK, str(rank), str(store.port), *arguments) for rank in range(2))
    for rank in (first, second):
        rank.wait_for_line("joined", 60)
    return store, first, second


def test_two_processes_gather(processes: ProcessGroup) -> None:
    _store, first, second = start(processes, "present", "60")
    for rank in (first, second):
        rank.wait_for_line("done", 30)
        assert rank.wait(10) == 0


def test_a_rank_that_does_not_come_ends_the_wait(processes: ProcessGroup) -> None:
    """It lives and its connections stand, but it is in no collective."""
    _store, first, _second = start(processes, "absent", "5")
    began = time.monotonic()
    assert first.wait(25) == 1
    assert time.monotonic() - began < 20
    assert "Timed out" in first.output or "timeout" in first.output.lower()


def test_backends_and_devices() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, 2) == "gloo"
    with pytest.raises(ValueError, match="nccl"):
        choose_backend("nccl", cpu, 2)
    assert rank_device(cpu, 3) == cpu


@pytest.mark.parametrize(
    ("first", "count", "rank", "expected"), [(0, 4, 3, 3), (1, 4, 2, 3), (0, 1, 3, 0), (1, 3, 2, 1)]
)
def test_ranks_take_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, rank: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert rank_device(torch.device("cuda", first), rank).index == expected
    enough = count - first >= rank + 1
    assert choose_backend("auto", torch.device("cuda", first), rank + 1) == ("nccl" if enough else "gloo")
    assert choose_backend("gloo", torch.device("cuda", first), rank + 1) == "gloo"


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            time.sleep(0.01)
    assert 20 <= watch.take_ms() < 500
    assert watch.take_ms() == 0


class ScriptedEvent:
    """A CUDA event that the test completes."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.at: float | None = None
        self.done = False

    def record(self) -> None:
        self.at = self._clock[0]
        self._clock[0] += 2.0

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: ScriptedEvent) -> float:
        if not (self.done and end.done) or self.at is None or end.at is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at - self.at


def test_a_stopwatch_on_a_gpu_counts_only_what_the_device_has_done() -> None:
    """A prompt chunk that samples nothing is not waited for: its collectives count towards a later step."""
    clock, events = [0.0], list[ScriptedEvent]()

    def new_event() -> ScriptedEvent:
        events.append(ScriptedEvent(clock))
        return events[-1]

    watch = Stopwatch(torch.device("cuda"), new_event)  # type: ignore[arg-type]
    for _ in range(2):
        with watch.running():
            pass
    assert watch.take_ms() == 0
    for event in events[:2]:
        event.done = True
    assert watch.take_ms() == 2.0
    assert watch.take_ms() == 0
    for event in events[2:]:
        event.done = True
    assert watch.take_ms() == 2.0
