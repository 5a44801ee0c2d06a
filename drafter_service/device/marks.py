"""When did a step come to each of its points, on the device and on the host?

On a GPU points are events of the stream, made once and used again by later steps; on a CPU the two clocks are one.
"""

from __future__ import annotations

import time

import torch

from engine.cuda.recording import Recorder

# Points of a step: the wait for the entry begins, and is over; draft prefill and first draft are done; everything is.
ASKED, BEGUN, PREFILLED, DONE = range(4)


class StepMarks:
    """The points of one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._recorder = Recorder()
            # Whoever waits for the last one sleeps, and leaves the core to those who enqueue.
            with torch.cuda.device(device):
                self._events = [self._recorder.make(blocking=point == DONE) for point in range(4)]
        self._host = [0.0] * 4

    def set(self, point: int) -> None:
        """The current stream comes to this point after everything enqueued so far."""
        self._host[point] = time.perf_counter()
        if self._events is not None:
            self._recorder.record(self._events[point])

    def host_time(self, point: int) -> float:
        """When the point was set, by `time.perf_counter`."""
        return self._host[point]

    def wait(self) -> None:
        """Until the device has come to DONE: for ever, where it hangs. Whoever waits sees to a deadline (see
        `engine.device_deadline`). RuntimeError: it has failed.
        """
        if self._events is not None:
            self._events[DONE].synchronize()

    def between(self, first: int, last: int) -> float:
        """Milliseconds between two points that were set and passed, on the device."""
        if self._events is not None:
            return self._recorder.between(self._events[first], self._events[last])
        return (self._host[last] - self._host[first]) * 1e3
