"""How long may a peer hold a stream open? Over real gRPC, with a device that only remembers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from engine.outbox import Outbox
from serving.streams import ServeStreams, next_message

FIRST_S, LEASE_S = 0.6, 1.2
WAIT_S = 20.0


@dataclass(frozen=True, eq=False)
class Stream:
    stream_id: int
    outbox: Outbox[bytes]


class Device:
    """Answers each command with itself. resident: whether streams hold anything. room: cleared, commands wait."""

    def __init__(self) -> None:
        self.resident = False
        self.room = threading.Event()
        self.room.set()
        self.submitted = threading.Semaphore(0)
        self.ended: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.streams: list[Stream] = []

    def make_stream(self, stream_id: int, outbox: Outbox[bytes]) -> Stream:
        self.streams.append(Stream(stream_id, outbox))
        return self.streams[-1]

    def submit(self, stream: Stream, command: bytes) -> bool:
        self.submitted.release()
        assert self.room.wait(WAIT_S)
        return stream.outbox.put(command)

    def end_stream(self, stream: Stream) -> None:
        self.ended.put(stream)
        stream.outbox.close()

    def holds(self, stream: Stream) -> bool:
        return self.resident


class Peer:
    """One Serve stream from the other side."""

    def __init__(self, address: str) -> None:
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        open_stream: Any = self._channel.stream_stream("/test.Test/Serve", bytes, bytes)
        self._call = open_stream(iter(self._commands.get, None))

    def send(self, command: bytes) -> None:
        self._commands.put(command)

    def event(self) -> bytes:
        event: bytes = next(self._call)
        return event

    def end(self) -> tuple[grpc.StatusCode, str]:
        """Wait for the service to end the stream."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        return self._call.code(), self._call.details()

    @property
    def over(self) -> bool:
        return not self._call.is_active()

    def close(self) -> None:
        self._commands.put(None)
        self._channel.close()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def connect(device: Device) -> Iterator[Callable[[], Peer]]:
    streams: ServeStreams[Stream, bytes, bytes] = ServeStreams(
        "service", device, device.make_stream, bytes, bytes, 8, LEASE_S, first_message_s=FIRST_S
    )
    handler = grpc.stream_stream_rpc_method_handler(streams.serve)
    pool = ThreadPoolExecutor(4)
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Serve": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    peers: list[Peer] = []

    def connect() -> Peer:
        peers.append(Peer(f"127.0.0.1:{port}"))
        return peers[-1]

    yield connect
    device.room.set()
    streams.close()
    for peer in peers:
        peer.close()
    server.stop(0).wait()
    pool.shutdown()


def test_a_peer_that_never_says_anything_is_sent_away(connect: Callable[[], Peer], device: Device) -> None:
    peer = connect()
    code, detail = peer.end()
    assert (code, detail) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no first message within 0.6 s")
    assert device.ended.get(timeout=WAIT_S) is device.streams[0]


def test_a_peer_that_falls_silent_with_requests_here_loses_them(connect: Callable[[], Peer], device: Device) -> None:
    device.resident = True
    peer = connect()
    for command in (b"a", b"b", b"c", b"d"):  # together longer than the lease
        peer.send(command)
        assert peer.event() == command
        time.sleep(LEASE_S / 3)
    began = time.monotonic()
    code, detail = peer.end()
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert detail == "no command for 1.2 s, while requests of this stream are resident"
    assert time.monotonic() - began > LEASE_S / 3
    assert device.ended.get(timeout=WAIT_S) is device.streams[0]


def test_a_peer_with_nothing_here_may_be_silent(connect: Callable[[], Peer], device: Device) -> None:
    peer = connect()
    peer.send(b"hello")
    assert peer.event() == b"hello"
    time.sleep(1.5 * LEASE_S)
    peer.send(b"again")
    assert peer.event() == b"again"


def test_a_peer_that_waits_for_us_is_not_silent(connect: Callable[[], Peer], device: Device) -> None:
    """Its command finds no room, then its answer takes long: each longer than the lease, neither its fault."""
    device.resident = True
    peer = connect()
    device.room.clear()
    peer.send(b"a")
    assert device.submitted.acquire(timeout=WAIT_S)
    time.sleep(1.5 * LEASE_S)
    assert not peer.over
    device.room.set()
    assert peer.event() == b"a"
    for event in (b"x", b"y", b"z"):
        time.sleep(LEASE_S / 2)
        device.streams[0].outbox.put(event)
        assert peer.event() == event


def test_the_next_message_comes_or_does_not() -> None:
    waiting = threading.Event()

    def messages() -> Iterator[int]:
        yield 1
        waiting.wait(WAIT_S)

    stream = messages()
    assert next_message(stream, WAIT_S) == 1
    with pytest.raises(TimeoutError, match=r"no message within 0.1 s"):
        next_message(stream, 0.1)
    waiting.set()
    assert next_message(iter(()), WAIT_S) is None
