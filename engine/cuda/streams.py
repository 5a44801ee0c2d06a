"""Which stream is current? As a number, for calls of the driver: torch's own object costs the host microseconds."""

from __future__ import annotations

from collections.abc import Callable

import torch


def device_index(device: torch.device) -> int:
    """Of a CUDA device, the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """What tells the current stream of that CUDA device, in the calling thread."""
    index = device_index(device)
    # What Triton and torch's own compiler ask; builds without CUDA lack it.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: torch.cuda.current_stream(index).cuda_stream
    return lambda: raw(index)
