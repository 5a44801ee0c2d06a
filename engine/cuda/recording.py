"""How is a point of a stream marked so that marking it can never stop the threads that watch over waits?

torch.cuda.Event.record, query and elapsed_time hold the interpreter lock while the driver works. That may be long: a
stream that waits for a peer has room for a thousand calls behind it, and whoever gives memory back keeps others out
until all streams are done. The watchdog that would end the wait needs the interpreter, so nothing would ever end it.
Called through ctypes, the driver has no lock of Python's.
"""

from __future__ import annotations

from ctypes import byref, c_float

import torch

from engine.cuda.library import CudaLibrary
from engine.cuda.streams import current_stream
from engine.errors import ChannelError


class Recorder:
    """Records events of torch's, which is still whom one asks to wait for them. Holds nothing of any device."""

    def __init__(self) -> None:
        """ChannelError: no CUDA driver here."""
        self._library = CudaLibrary()

    def make(self, blocking: bool) -> torch.cuda.Event:
        """An event with a time, on the current device. It exists at once: torch makes one when it is first recorded.

        blocking: who waits for it sleeps.
        """
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        event.record()
        return event

    def record(self, event: torch.cuda.Event) -> None:
        """Mark where the current stream is now, as torch does. RuntimeError: the device has failed."""
        self._call("cuEventRecord", event.cuda_event, current_stream())

    def passed(self, event: torch.cuda.Event) -> bool:
        """Whether the device has come past the point that was recorded last. RuntimeError: the device has failed."""
        try:
            return self._library.is_ready("cuEventQuery", event.cuda_event)
        except ChannelError as error:
            raise _as_torch(error) from error

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Milliseconds between two points that the device has passed. RuntimeError: it has not, or has failed."""
        elapsed = c_float()
        self._call("cuEventElapsedTime", byref(elapsed), first.cuda_event, last.cuda_event)
        return elapsed.value

    def _call(self, function: str, *arguments: object) -> None:
        try:
            self._library.call(function, *arguments)
        except ChannelError as error:
            raise _as_torch(error) from error


def _as_torch(error: ChannelError) -> RuntimeError:
    return RuntimeError(f"CUDA error: {error}")
