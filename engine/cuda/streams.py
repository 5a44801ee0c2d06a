"""Which stream is current? As a number, for calls of the driver: torch's own object costs the host microseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

# What Triton and torch's own compiler ask; builds without CUDA lack it.
_raw: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def device_index(device: torch.device) -> int:
    """Of a CUDA device, the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream() -> int:
    """Of the current device, in the calling thread."""
    return _raw(torch.cuda.current_device())


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """What tells the current stream of that CUDA device, in the calling thread."""
    return partial(_raw, device_index(device))
