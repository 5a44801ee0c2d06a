"""Who notices that a device does not come back from a piece of work?

A kernel that hangs ends nothing: whoever waits for it waits inside the driver, for ever, and CUDA has no wait with a
deadline. To ask the device again and again instead would cost every step time. So waits stay as they are, whoever
begins something that may not end says so, and one thread looks now and then whether anything has taken far too long.
What it then does has to end the process: the thread that waits, or is held up in a launch behind it, cannot be saved.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKS = 16  # in the time allowed: how exactly it is kept
LOOK_EVERY_S = 1.0  # at most


class DeviceDeadline:
    """Owner of the thread. `over` may be used by any thread, nested too; it costs about a microsecond.

    Only time in which this process runs counts: one that was stopped for a while finds nothing overdue that had only no
    time to be done.
    """

    def __init__(self, limit_s: float | None, on_overdue: Callable[[str], object]) -> None:
        """limit_s: the most that one piece of work may take; None: anything (a CPU is never lost). on_overdue: called
        once, by a thread of its own, with what was overdue.
        """
        self._limit_s = limit_s
        self._on_overdue = on_overdue
        self._look_every_s = min(LOOK_EVERY_S, (limit_s or LOOK_EVERY_S) / LOOKS)
        self._running_s = 0.0
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[str, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-deadline", daemon=True)

    def start(self) -> None:
        """Start to look."""
        if self._limit_s is not None:
            self._thread.start()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Around a piece of work on the device, or a wait for it. what: names it where it is overdue."""
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = (what, self._running_s)
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[number]

    def close(self) -> None:
        """Look no more. Idempotent; any thread."""
        self._closing.set()

    def _run(self) -> None:
        assert self._limit_s is not None
        looked_at = time.monotonic()
        while not self._closing.wait(self._look_every_s):
            now = time.monotonic()
            self._running_s += min(now - looked_at, 2 * self._look_every_s)
            looked_at = now
            with self._lock:
                overdue = [what for what, since in self._under_way.values() if self._running_s - since > self._limit_s]
            if overdue:
                self._on_overdue(f"{overdue[0]} is not done after {self._limit_s:g} s")
                return
