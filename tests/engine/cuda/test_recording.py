"""Whether the device has passed an event is asked by way of the driver, without the interpreter lock."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import graphs
from engine.cuda import recording
from engine.cuda.library import NOT_READY
from engine.cuda.recording import Recorder
from engine.graphs import GraphCache
from engine.step_marks import StepMarks

ILLEGAL_ADDRESS = 700


class Driver:
    """A libcuda whose cuEventQuery answers from `answers`, by event."""

    def __init__(self, answers: dict[int, int]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            return self._answers[arguments[0]] if name == "cuEventQuery" else 0

        setattr(self, name, call)
        return call


class Event:
    """One of torch's, whose own question holds the lock."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle

    def query(self) -> bool:
        raise AssertionError("asked with the interpreter lock held")


def event(handle: int) -> torch.cuda.Event:
    return cast(torch.cuda.Event, Event(handle))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    found = {1: 0, 2: NOT_READY, 3: ILLEGAL_ADDRESS}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(found))
    return found


def test_passed_not_passed_and_failed(answers: dict[int, int]) -> None:
    recorder = Recorder()
    assert recorder.passed(event(1))
    assert not recorder.passed(event(2))
    with pytest.raises(RuntimeError, match=rf"^CUDA error: cuEventQuery: CUDA error {ILLEGAL_ADDRESS}"):
        recorder.passed(event(3))


def test_steps_and_graphs_ask_so(answers: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(self: Recorder, blocking: bool) -> torch.cuda.Event:
        made.append(10 + len(made))
        answers[made[-1]] = NOT_READY
        return event(made[-1])

    monkeypatch.setattr(Recorder, "make", make)
    monkeypatch.setattr(recording, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    marks = StepMarks(torch.device("cuda"))
    last = made[-1]
    assert not marks.done()
    answers[last] = 0
    assert marks.done()

    cache = GraphCache("cpu", 1)
    cache._recorder = Recorder()
    monkeypatch.setattr(
        graphs, "torch", SimpleNamespace(cuda=SimpleNamespace(stream=lambda _: contextlib.nullcontext()))
    )
    has_passed = cache._mark()
    assert made[-1] != last
    assert not has_passed()
    answers[made[-1]] = 0
    assert has_passed()
