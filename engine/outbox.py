"""How do events reach one gateway, without the device ever waiting for it?

Each Serve stream of a service has a bounded outbox. The device thread puts, the stream's RPC thread takes; a gateway
that does not read its events loses its stream, never the others' time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Outbox(Generic[EventT]):
    """A bounded queue of events with an end. Safe between threads.

    on_overflow: called once, by the thread that put one event too many.
    """

    def __init__(self, max_len: int, on_overflow: Callable[[], object]) -> None:
        self._max_len = max_len
        self._on_overflow = on_overflow
        self._events: deque[EventT] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no further event can be put."""
        return self._closed

    def put(self, event: EventT) -> bool:
        """Queue an event. False when it was dropped: closed, or full (which closes it)."""
        with self._changed:
            if self._closed:
                return False
            overflow = len(self._events) >= self._max_len
            if overflow:
                self._closed = True
                self._events.clear()
            else:
                self._events.append(event)
            self._changed.notify_all()
        if overflow:
            self._on_overflow()
        return not overflow

    def take(self, deadline_s: float) -> EventT | None:
        """The next event, or None when there is none within the deadline, or none will come any more."""
        with self._changed:
            if not self._events and not self._closed:
                self._changed.wait(deadline_s)
            return self._events.popleft() if self._events else None

    def finished(self) -> bool:
        """Whether the end is reached: closed, and everything taken."""
        with self._changed:
            return self._closed and not self._events

    def close(self) -> None:
        """No more events; those queued can still be taken. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
