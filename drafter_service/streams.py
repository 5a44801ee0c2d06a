"""How do commands reach the device thread, without one gateway holding up another?

Each Serve stream has a bounded inbox. The device thread looks at the heads of all inboxes in turn, so that a stream
whose step is not ready yet does not stop the others. A gateway that sends too much is slowed down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from drafter_service.channels import AttachOutcome
from drafter_service.messages import Command, Event, OpenChannel, StepRequest
from engine.outbox import Outbox


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The last command of every stream."""


StreamCommand = Command | AttachOutcome | StreamEnded


class GatewayStream:
    """One Serve stream. The device thread sets `gateway_id` when hello came (None before), and `ended` at its end."""

    def __init__(self, stream_id: int, outbox: Outbox[Event]) -> None:
        self.stream_id = stream_id
        self.outbox = outbox
        self.gateway_id: str | None = None
        self.ended = False


class Inboxes:
    """The commands of all streams, in order within each. Safe between threads; one thread takes.

    max_len: commands a stream may have waiting.
    """

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self._changed = threading.Condition()
        self._queues: dict[GatewayStream, deque[StreamCommand]] = {}
        self._closed = False
        self._nudged = False

    def put(self, stream: GatewayStream, command: StreamCommand, deadline_s: float | None) -> bool:
        """Queue a command, waiting while the stream's inbox is full. False: closed, or full until the deadline.

        deadline_s None: never waits and is never refused, for the few commands that the service itself sends.
        """
        end = None if deadline_s is None else time.monotonic() + deadline_s
        with self._changed:
            while not self._closed:
                waiting = self._queues.get(stream)
                if end is None or waiting is None or len(waiting) < self._max_len:
                    self._queues.setdefault(stream, deque()).append(command)
                    self._changed.notify_all()
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return False

    def heads(self, deadline_s: float) -> list[tuple[GatewayStream, StreamCommand]]:
        """The first command of every stream that has one; waits for one, or for a nudge, until the deadline."""
        with self._changed:
            if not self._queues and not self._closed and not self._nudged:
                self._changed.wait(deadline_s)
            self._nudged = False
            return [(stream, waiting[0]) for stream, waiting in self._queues.items()]

    def nudge(self) -> None:
        """There is something else to look at for whoever waits in `heads`. From any thread."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def pop(self, stream: GatewayStream, command: StreamCommand) -> None:
        """Drop the stream's first command, which is done with."""
        with self._changed:
            waiting = self._queues[stream]
            assert waiting[0] is command, "one thread takes"
            waiting.popleft()
            if not waiting:
                del self._queues[stream]
            self._changed.notify_all()

    def later_plans(self, stream: GatewayStream, channel_id: str) -> int:
        """Plans of the channel that wait behind the stream's first command. Its end counts as one; so does a channel
        that is asked for anew, as the gateway has given this one up.
        """
        with self._changed:
            behind = list(self._queues.get(stream, ()))[1:]
            return sum(
                isinstance(command, StreamEnded | OpenChannel)
                or (isinstance(command, StepRequest) and command.channel_id == channel_id)
                for command in behind
            )

    def close(self) -> None:
        """Take in nothing more, and release whoever waits. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed
