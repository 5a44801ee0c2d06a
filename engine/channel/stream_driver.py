"""What must a device be able to do so that its work can wait for another process?

The face of CUDA that the ends of a `cuda_ipc` channel see (engine/cuda/device.py is the real one). Small enough that a
test can stand in for it with threads as streams. Streams are opaque: whatever `current_stream` returned.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """Memory that another process can open. memory: [num_bytes] uint8, zeroed; it is freed with its last view."""

    memory: torch.Tensor
    handle: bytes


class DevicePage(Protocol):
    """A mapped host page that streams can wait on and write to."""

    def close(self) -> None:
        """Take it away from the device; nothing enqueued may still use it. Idempotent."""
        ...


class StreamDriver(Protocol):
    """One device, seen from one process. Safe between threads. Everything raises ChannelError when the device cannot.

    device: what tensors claim to be on. uuid: its name among all devices of all machines.
    """

    device: torch.device
    uuid: str

    def allocate(self, num_bytes: int) -> DeviceExport:
        """New memory on the device."""
        ...

    def open(self, handle: bytes, num_bytes: int, uuid: str, on_closed: Callable[[], None]) -> torch.Tensor:
        """Map what another process exported from device `uuid`: [num_bytes] uint8, closed with its last view.

        on_closed: called once the mapping is gone, from any thread. Opening what this process exported fails.
        """
        ...

    def register(self, buffer: mmap.mmap) -> DevicePage:
        """Let streams use a host mapping. The page keeps the mapping alive."""
        ...

    def current_stream(self) -> Hashable:
        """The calling thread's current stream on the device."""
        ...

    def wait_value(self, stream: Hashable, page: DevicePage, offset: int, value: int) -> None:
        """Enqueue: wait until the 32-bit word at `offset` bytes has reached `value`, as control.reached compares."""
        ...

    def write_values(self, stream: Hashable, page: DevicePage, values: Sequence[tuple[int, int]]) -> None:
        """Enqueue, one after the other: of each (offset, value), behind a system-wide memory barrier, store the value's
        low 32 bits at `offset` bytes.
        """
        ...

    def mark(self, stream: Hashable) -> Callable[[], bool]:
        """Enqueue a mark; the function returned tells, without waiting, whether the stream has passed it."""
        ...
