"""How long does rank 0 stand in the collectives of each step, when steps are launched ahead?

Whoever launches a step takes its `Lap` along and asks it once the step is done. On a GPU a lap is pairs of events of
the stream, which are used again; they are recorded by way of the driver, for a stream may have no room for them before
a drafter's reply is there (engine/cuda/recording.py). Steps that are captured have no laps: the events of a graph say
nothing of its runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from engine.cuda.recording import Recorder


class Lap:
    """One step's time in collectives. Used once, by the thread that launched the step."""

    def __init__(self, watch: LapWatch, seconds: float, pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._watch = watch
        self._seconds = seconds
        self._pairs = pairs

    def take_ms(self) -> float:
        """Milliseconds. Once the device is done with the step."""
        milliseconds = self._seconds * 1e3
        for first, last in self._pairs:
            milliseconds += self._watch.between(first, last)
        self.drop()
        return milliseconds

    def drop(self) -> None:
        """Nobody will ask. At any time: that the device has not come past its events yet keeps nobody from recording
        them again.
        """
        self._watch.give_back(self._pairs)
        self._pairs = []


class LapWatch:
    """A Watch of steps that are launched ahead. Used by one thread. On a GPU under the device that it was made for."""

    def __init__(self, device: torch.device, num_pairs: int) -> None:
        """num_pairs: of events that are made now; more are made when they run out."""
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._recorder: Recorder | None = None
        if device.type == "cuda":
            self._recorder = Recorder()
            with torch.cuda.device(device):
                self._free = [self._make(self._recorder) for _ in range(num_pairs)]

    @property
    def num_free(self) -> int:
        """Pairs of events that may be recorded."""
        return len(self._free)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """See Watch."""
        recorder = self._recorder
        if recorder is None:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = self._free.pop() if self._free else self._make(recorder)
        recorder.record(first)
        yield
        recorder.record(last)
        self._pairs.append((first, last))

    def cut(self) -> Lap:
        """What was counted since the last cut."""
        lap = Lap(self, self._seconds, self._pairs)
        self._seconds, self._pairs = 0.0, []
        return lap

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """For laps: milliseconds between two points that the device has passed."""
        assert self._recorder is not None  # there are no events otherwise
        return self._recorder.between(first, last)

    def give_back(self, pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        """For laps: these may be recorded again."""
        self._free += pairs

    @staticmethod
    def _make(recorder: Recorder) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return recorder.make(blocking=False), recorder.make(blocking=False)


class NoWatch:
    """A Watch for ranks that nobody asks, and for steps that are captured."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """See Watch."""
        return contextlib.nullcontext()
