"""How does a service's main thread wait until somebody asks it to stop?

A `threading.Event` will not do. Of two signals in a row the system may hand one to another thread, and then nothing
wakes the main thread, whose lot Python's handlers are; and a handler that sets an event which the same thread is about
to wait for blocks for ever. So the handler puts into a `SimpleQueue`, which may be re-entered, and no wait is
endless.
"""

from __future__ import annotations

import queue
import signal


class StopSignal:
    """SIGTERM, SIGINT or `ask`, whichever comes first. Make it in the main thread."""

    def __init__(self) -> None:
        """Take over both signals."""
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ask())

    def ask(self) -> None:
        """From any thread, any number of times."""
        self._asked.put(None)

    def wait(self, seconds: float) -> bool:
        """Whether it was asked for within `seconds`, which is also how late a signal may be noticed."""
        try:
            self._asked.get(timeout=seconds)
        except queue.Empty:
            return False
        return True
