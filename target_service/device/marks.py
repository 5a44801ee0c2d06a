"""When did the device come past a point of a step, and is it done?

Four points of a step on its stream: CUDA events, which cost the host nothing to set; on a CPU, where every call is done
when it returns, the time of the call. Reused from step to step.
"""

from __future__ import annotations

import time

import torch

from engine.cuda.recording import Recorder

BEGAN, WAITED, FORWARDED, ENDED = range(4)


class Marks:
    """The points of one step at a time. `set` by the thread that launches, `wait` by any, `between` after `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._times = [0.0] * 4
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._recorder = Recorder()
            with torch.cuda.device(device):
                # Whoever waits for the last one sleeps, and leaves the core to those who launch.
                self._events = [self._recorder.make(blocking=point == ENDED) for point in range(4)]

    def set(self, point: int) -> None:
        """The current stream is here."""
        if self._events is not None:
            self._recorder.record(self._events[point])
        else:
            self._times[point] = time.perf_counter()

    def done(self) -> bool:
        """Whether the device has come past ENDED."""
        return self._events is None or self._events[ENDED].query()

    def wait(self) -> None:
        """Block until the device has come past ENDED: for ever, where it hangs. Whoever waits sees to a deadline (see
        `engine.device_deadline`).
        """
        if self._events is not None:
            self._events[ENDED].synchronize()

    def between(self, first: int, last: int) -> float:
        """Milliseconds."""
        if self._events is not None:
            return self._recorder.between(self._events[first], self._events[last])
        return (self._times[last] - self._times[first]) * 1e3
