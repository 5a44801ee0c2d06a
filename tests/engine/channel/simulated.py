"""A device made of threads: its streams are queues that a thread works off, its memory lies under /dev/shm.

Stands in for a GPU behind engine.channel.stream_driver: work is enqueued and returns at once, waits hold up one stream
and nothing else, memory can be opened by other processes and not by its own, and whatever touches a page that was
taken away is noted as a fault.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from engine.channel.control import reached
from engine.channel.memory import ExportedMemory, attach_memory
from engine.channel.stream_driver import DeviceExport, DevicePage
from engine.errors import ChannelError

POLL_S = 0.0005
MAX_QUEUED = 10_000
UUID = "SIM-0"


class SimulatedStream:
    """A queue of work and the thread that does it."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUEUED)
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def mark(self) -> Callable[[], bool]:
        passed = threading.Event()
        self.enqueue(passed.set)
        return passed.is_set

    def synchronize(self, timeout_s: float) -> None:
        passed = threading.Event()
        self.enqueue(passed.set)
        if not passed.wait(timeout_s):
            raise TimeoutError(f"the stream was not done within {timeout_s} s")
        assert not self.faults, self.faults

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception as error:  # a device reports what went wrong when it is asked next
                self.faults.append(repr(error))
            del work  # or the last piece of work, and all it holds, would live until the next comes


class SimulatedPage:
    """A page that streams can use until it is closed."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.closed = False
        self._buffer = buffer

    def close(self) -> None:
        self.closed = True

    def word(self, offset: int) -> ctypes.c_uint32:
        if self.closed:
            raise ChannelError("the page was taken away")
        return ctypes.c_uint32.from_buffer(self._buffer, offset)


class SimulatedDriver:
    """See StreamDriver. `stream` is the current stream of every thread."""

    def __init__(self, uuid: str = UUID) -> None:
        self.device = torch.device("cpu")
        self.uuid = uuid
        self.stream = SimulatedStream()
        self._exported: set[bytes] = set()

    def run(self, kernel: Callable[[], None]) -> None:
        """Enqueue work on the current stream."""
        self.stream.enqueue(kernel)

    def synchronize(self, timeout_s: float = 30.0) -> None:
        self.stream.synchronize(timeout_s)

    def allocate(self, num_bytes: int) -> DeviceExport:
        exported = ExportedMemory(num_bytes)
        buffer = exported.buffer
        del exported.buffer  # the views alone keep it
        weakref.finalize(buffer, exported.close)
        handle = exported.name.encode()
        self._exported.add(handle)
        return DeviceExport(torch.frombuffer(buffer, dtype=torch.uint8), handle)

    def open(self, handle: bytes, num_bytes: int, uuid: str, on_closed: Callable[[], None]) -> torch.Tensor:
        if handle in self._exported:
            raise ChannelError("handle: exported by this very process")
        if uuid != self.uuid:
            raise ChannelError(f"device_uuid: memory of {uuid!r} is out of reach of {self.uuid}")
        buffer = attach_memory(handle.decode(), num_bytes)
        weakref.finalize(buffer, on_closed)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def register(self, buffer: mmap.mmap) -> DevicePage:
        return SimulatedPage(buffer)

    def current_stream(self) -> Hashable:
        return self.stream

    def wait_value(self, stream: Hashable, page: DevicePage, offset: int, value: int) -> None:
        assert isinstance(stream, SimulatedStream)
        assert isinstance(page, SimulatedPage)

        def wait() -> None:
            while not reached(page.word(offset).value, value):
                time.sleep(POLL_S)  # a device looks again and again, too

        stream.enqueue(wait)

    def write_values(self, stream: Hashable, page: DevicePage, values: Sequence[tuple[int, int]]) -> None:
        assert isinstance(stream, SimulatedStream)
        assert isinstance(page, SimulatedPage)

        def write(offset: int, value: int) -> None:
            page.word(offset).value = value & 0xFFFFFFFF

        for offset, value in values:
            stream.enqueue(partial(write, offset, value))

    def mark(self, stream: Hashable) -> Callable[[], bool]:
        assert isinstance(stream, SimulatedStream)
        return stream.mark()
