"""How does a service hold a gateway's stream, and how long may a peer hold one open?

A Serve stream has two threads: one reads commands into the device's queue, the RPC's own sends events from the stream's
outbox. Every stream takes one of the few places that there are, and its requests take seats, so a peer has to say
something: its first message within a deadline, and, as long as requests of its own are resident, something now and
then. A gateway that has nothing running may be silent for as long as it is there; that one has vanished is for gRPC's
pings to find out.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import grpc

from engine.outbox import Outbox

_log = logging.getLogger(__name__)

POLL_S = 1.0  # at most: how often a quiet stream looks whether its peer is still there, and late
FIRST_MESSAGE_S = 10.0  # a peer has its first message ready when it opens a stream

MessageT = TypeVar("MessageT")
StreamT = TypeVar("StreamT", bound="ServedStream")
CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class ServedStream(Protocol):
    """A stream as its service knows it."""

    @property
    def stream_id(self) -> int: ...

    @property
    def outbox(self) -> Outbox[Any]: ...


class Device(Protocol[StreamT, CommandT]):  # type: ignore[misc]  # both are only ever taken
    """Who carries out what streams ask for. Any thread may call."""

    def submit(self, stream: StreamT, command: CommandT) -> bool:
        """Queue a command, waiting for room. False when there never will be any."""
        ...

    def end_stream(self, stream: StreamT) -> None:
        """Queue the end of a stream, after everything it sent."""
        ...

    def holds(self, stream: StreamT) -> bool:
        """Whether requests of the stream are resident."""
        ...


class ServeStreams(Generic[StreamT, CommandT, EventT]):
    """The Serve streams of one service. Safe between threads.

    service: what it is called to a peer. event_queue: bound of a stream's outbox. lease_s: how long a peer may neither
    send anything nor be sent anything while it has requests here.
    """

    def __init__(
        self,
        service: str,
        device: Device[StreamT, CommandT],
        make_stream: Callable[[int, Outbox[EventT]], StreamT],
        decode: Callable[[Any], CommandT],
        encode: Callable[[EventT], Any],
        event_queue: int,
        lease_s: float,
        first_message_s: float = FIRST_MESSAGE_S,
    ) -> None:
        self._service = service
        self._device = device
        self._make_stream = make_stream
        self._decode = decode
        self._encode = encode
        self._event_queue = event_queue
        self._lease_s = lease_s
        self._first_message_s = first_message_s
        self._poll_s = min(POLL_S, lease_s / 4, first_message_s / 4)
        self._stream_ids = itertools.count(1)
        self._outboxes: dict[int, Outbox[EventT]] = {}
        self._lock = threading.Lock()
        self._closing = False

    def serve(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """One gateway's stream, until either side ends it. DEADLINE_EXCEEDED where the peer is silent too long."""
        outbox: Outbox[EventT] = Outbox(self._event_queue, on_overflow=context.cancel)
        stream = self._make_stream(next(self._stream_ids), outbox)
        if not self._open(stream.stream_id, outbox) or not context.add_callback(
            lambda: self._close(stream.stream_id, outbox)
        ):
            self._close(stream.stream_id, outbox)
            context.abort(grpc.StatusCode.UNAVAILABLE, f"the {self._service} is stopping")
        peer = _Peer()
        # The reader outlives this generator, which a broken RPC may leave at any `yield`: so it is the reader that ends
        # the stream on the device, when its iterator ends, as it does with the RPC.
        threading.Thread(
            target=self._read, args=(messages, stream, peer), name=f"stream-{stream.stream_id}", daemon=True
        ).start()
        while not outbox.finished():
            event = outbox.take(self._poll_s)
            if event is not None:
                yield self._encode(event)
                peer.active()
            elif late := self._late(stream, peer):
                _log.warning("stream %d: %s", stream.stream_id, late)
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)

    def close(self) -> None:
        """End every stream; new ones are refused."""
        with self._lock:
            self._closing = True
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.close()

    def _open(self, stream_id: int, outbox: Outbox[EventT]) -> bool:
        with self._lock:
            if not self._closing:
                self._outboxes[stream_id] = outbox
            return not self._closing

    def _close(self, stream_id: int, outbox: Outbox[EventT]) -> None:
        outbox.close()  # commands still queued are not worth running
        with self._lock:
            self._outboxes.pop(stream_id, None)

    def _read(self, messages: Iterator[Any], stream: StreamT, peer: _Peer) -> None:
        try:
            for message in messages:
                peer.said_something()
                if not self._device.submit(stream, self._decode(message)):
                    break
                peer.awaited()
        except grpc.RpcError:
            stream.outbox.close()  # the stream broke
        finally:
            self._device.end_stream(stream)

    def _late(self, stream: StreamT, peer: _Peer) -> str | None:
        """What the peer should have said by now."""
        quiet_s = peer.quiet_s()
        if not peer.greeted:
            return f"no first message within {self._first_message_s:g} s" if quiet_s > self._first_message_s else None
        if quiet_s > self._lease_s and self._device.holds(stream):
            return f"no command for {self._lease_s:g} s, while requests of this stream are resident"
        return None


class _Peer:
    """How long has the other side been silent? Set by the stream's two threads, each its own part."""

    def __init__(self) -> None:
        self.greeted = False
        self._awaited = True
        self._active_at = time.monotonic()

    def said_something(self) -> None:
        self.greeted = True
        self._awaited = False

    def awaited(self) -> None:
        """Its next message is waited for."""
        self._active_at = time.monotonic()
        self._awaited = True

    def active(self) -> None:
        """It was sent something, which may be what it waited for."""
        self._active_at = time.monotonic()

    def quiet_s(self) -> float:
        """0 while it is us who are waited for."""
        return time.monotonic() - self._active_at if self._awaited else 0.0


def next_message(messages: Iterator[MessageT], deadline_s: float) -> MessageT | None:
    """The next message of a stream; None: there is none any more, or the stream broke. TimeoutError: none came in time;
    the stream is to be ended then.
    """
    came: queue.SimpleQueue[MessageT | None] = queue.SimpleQueue()

    def read() -> None:  # ends with the RPC, if not before
        message = None
        try:
            message = next(messages, None)
        except grpc.RpcError as error:
            _log.info("a stream broke: %s", error)
        finally:
            came.put(message)

    threading.Thread(target=read, name="next-message", daemon=True).start()
    try:
        return came.get(timeout=deadline_s)
    except queue.Empty:
        raise TimeoutError(f"no message within {deadline_s:g} s") from None
