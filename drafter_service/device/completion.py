"""How does the device thread learn that a step is done, without waiting for it?

Another thread waits for the step and says so. Steps are done in the order in which they were enqueued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine.device_deadline import DeviceDeadline


class Pending(Protocol):
    """A step that was enqueued."""

    def wait(self) -> None:
        """Until the device is done with it. RuntimeError: the device has failed."""
        ...


class Completions:
    """Steps under way, and those that are done and not taken yet. `wait` ends early when one is done.

    on_done: called, from the waiting thread, when a step is done or the device has failed. deadline: of each step, from
    when the one before it was done.
    """

    def __init__(self, on_done: Callable[[], None], deadline: DeviceDeadline) -> None:
        self._changed = threading.Condition()
        self._under_way: deque[Pending] = deque()
        self._num_done = 0
        self._closed = False
        self._error: BaseException | None = None
        self._on_done = on_done
        self._deadline = deadline
        self._thread = threading.Thread(target=self._run, name="completion", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, step: Pending) -> None:
        """A step was enqueued."""
        with self._changed:
            self._under_way.append(step)
            self._changed.notify_all()

    def take_done(self) -> int:
        """How many more steps are done, in order. Raises what the device failed with."""
        with self._changed:
            if self._error is not None:
                raise self._error
            done, self._num_done = self._num_done, 0
            return done

    def wait(self, deadline_s: float) -> None:
        """Until a step is done, the device has failed, or the deadline has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done or self._error is not None or self._closed, deadline_s)

    def close(self, deadline_s: float) -> None:
        """End the thread, once the step it waits for is done; within the deadline, or not at all."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._closed)
                if self._closed:
                    return
                step = self._under_way.popleft()
            try:
                with self._deadline.over("a step"):
                    step.wait()
            except RuntimeError as error:  # the device has failed: whoever takes steps ends with it
                self._done(error)
                return
            self._done(None)

    def _done(self, error: BaseException | None) -> None:
        with self._changed:
            if error is None:
                self._num_done += 1
            else:
                self._error = error
            self._changed.notify_all()
        self._on_done()
