"""When did a step come to each of its points, on its device and on the host?

On a GPU points are events of the stream, made once and used again by later steps; on a CPU, where every call is done
when it returns, the two clocks are one.
"""

from __future__ import annotations

import time

import torch

from engine.cuda.recording import Recorder

# A step has so many points, numbered from 0; it is done at the last.
NUM_POINTS = 4
_LAST = NUM_POINTS - 1


class StepMarks:
    """The points of one step at a time. `set` by the thread that launches, `wait` and `done` by any, `between` after
    `wait`. RuntimeError from any of them: the device has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = [0.0] * NUM_POINTS
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._recorder = Recorder()
            with torch.cuda.device(device):
                # Whoever waits for the last one sleeps, and leaves the core to those who launch.
                self._events = [self._recorder.make(blocking=point == _LAST) for point in range(NUM_POINTS)]

    def set(self, point: int) -> None:
        """The current stream comes to this point after everything enqueued so far."""
        self._host[point] = time.perf_counter()
        if self._events is not None:
            self._recorder.record(self._events[point])

    def host_time(self, point: int) -> float:
        """When the point was set, by `time.perf_counter`."""
        return self._host[point]

    def done(self) -> bool:
        """Whether the device has come past the last point."""
        return self._events is None or self._recorder.passed(self._events[_LAST])

    def wait(self) -> None:
        """Block until the device has come past the last point: for ever, where it hangs. Whoever waits sees to a
        deadline (see `device_deadline`).
        """
        if self._events is not None:
            self._events[_LAST].synchronize()

    def between(self, first: int, last: int) -> float:
        """Milliseconds between two points that were set and passed, on the device."""
        if self._events is not None:
            return self._recorder.between(self._events[first], self._events[last])
        return (self._host[last] - self._host[first]) * 1e3
