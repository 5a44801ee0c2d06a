"""Who waits for a device too long is named, once; who was only stopped, or takes no more than its time, is not."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from engine import device_deadline
from engine.device_deadline import DeviceDeadline

LIMIT_S = 0.4


def made(limit_s: float | None = LIMIT_S) -> tuple[DeviceDeadline, queue.SimpleQueue[str]]:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadline = DeviceDeadline(limit_s, told.put)
    deadline.start()
    return deadline, told


def test_what_takes_too_long_is_named_once() -> None:
    deadline, told = made()
    with deadline.over("a step"), deadline.over("a wait"):
        assert told.get(timeout=10) == "a step is not done after 0.4 s"
        with pytest.raises(queue.Empty):
            told.get(timeout=2 * LIMIT_S)


def test_pieces_are_timed_each_for_itself() -> None:
    deadline, told = made()
    pause = threading.Event()
    for _ in range(6):
        with deadline.over("a step"):
            pause.wait(LIMIT_S / 4)
    deadline.close()
    assert told.empty()


def test_a_piece_that_fails_is_over() -> None:
    deadline, told = made()
    with pytest.raises(RuntimeError), deadline.over("a step"):
        raise RuntimeError
    with pytest.raises(queue.Empty):
        told.get(timeout=2 * LIMIT_S)
    deadline.close()


def test_without_a_limit_nothing_is_overdue() -> None:
    deadline, told = made(None)
    with deadline.over("a step"), pytest.raises(queue.Empty):
        told.get(timeout=2 * LIMIT_S)


def test_time_in_which_the_process_stands_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGCONT the clock is hours on, and whoever waits has had no time to see that the device is done."""
    hours = iter(range(0, 1 << 40, 3600))
    monkeypatch.setattr(device_deadline, "time", SimpleNamespace(monotonic=lambda: float(next(hours))))
    deadline, told = made(10.0)
    with deadline.over("a step"), pytest.raises(queue.Empty):
        told.get(timeout=1.5)  # two looks
    deadline.close()
