"""How does what the host packed get onto the device, and a step's outcome back, at the price of one call?

`Tensor.copy_` makes two views first, asks whose memory this is, and tells the allocator of pinned memory who uses it.
Here both ends are settled once: whoever has them keeps the host's until the device is past the copy, as all buffers of
steps under way are kept. On a CPU, where nobody counts microseconds, it is `copy_`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cuda.library import CudaLibrary
from engine.cuda.streams import current_stream_of
from engine.errors import ChannelError

Copy = Callable[[int], None]


def prepare_copy(out: torch.Tensor, source: torch.Tensor) -> Copy:
    """What enqueues, on the current stream, the copy of the first n elements of `source` to `out`, for any n that both
    have. Both are contiguous, of one dtype; between a GPU and the host, whose memory is then pinned, or on a CPU.

    The copy raises RuntimeError when the device has failed.
    """
    if out.dtype != source.dtype or not out.is_contiguous() or not source.is_contiguous():
        raise ValueError(f"out: must be contiguous and {source.dtype} as the source is, got {out.dtype}")
    kinds = (out.device.type, source.device.type)
    if kinds == ("cpu", "cpu"):
        flat_out, flat_source = out.view(-1), source.view(-1)

        def copy(count: int) -> None:
            flat_out[:count].copy_(flat_source[:count])

        return copy
    if kinds not in (("cuda", "cpu"), ("cpu", "cuda")):
        raise ValueError(f"out: copies go between the host and a GPU, not from {source.device} to {out.device}")
    return _Pinned(out, source)


class DeviceCopies:
    """Copies within one device, the host's own tensors on a CPU. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._call = CudaLibrary().call if device.type == "cuda" else None
        self._stream = current_stream_of(device) if device.type == "cuda" else int

    def copy(self, out: torch.Tensor, source: torch.Tensor, count: int) -> None:
        """Enqueue, on the current stream: the first `count` elements of `source` to `out`. Both are contiguous, of one
        dtype, on the device (or in memory that it reaches), and have as many. RuntimeError: the device has failed.
        """
        if count > min(out.numel(), source.numel()):
            raise ValueError(f"count: {count} elements, the ends have {out.numel()} and {source.numel()}")
        if out.dtype != source.dtype or not out.is_contiguous() or not source.is_contiguous():
            raise ValueError(f"out: must be contiguous and {source.dtype} as the source is, got {out.dtype}")
        if self._call is None:
            out.view(-1)[:count].copy_(source.view(-1)[:count])
        elif count:
            num_bytes = count * out.element_size()
            _checked(self._call, "cuMemcpyDtoDAsync_v2", out.data_ptr(), source.data_ptr(), num_bytes, self._stream())


class _Pinned:
    """A copy between pinned memory and a GPU. Holds both ends."""

    def __init__(self, out: torch.Tensor, source: torch.Tensor) -> None:
        to_device = out.is_cuda
        if not (source if to_device else out).is_pinned():
            raise ValueError("out: the host's memory must be pinned, or the copy waits for the device")
        self._ends = (out, source)
        self._addresses = (out.data_ptr(), source.data_ptr())
        self._most = min(out.numel(), source.numel())
        self._item = out.element_size()
        self._name = "cuMemcpyHtoDAsync_v2" if to_device else "cuMemcpyDtoHAsync_v2"
        self._call = CudaLibrary().call
        self._stream = current_stream_of((out if to_device else source).device)

    def __call__(self, count: int) -> None:
        if not 0 <= count <= self._most:
            raise ValueError(f"count: {count} elements, the ends have {self._most}")
        if count:
            _checked(self._call, self._name, *self._addresses, count * self._item, self._stream())


def _checked(call: Callable[..., None], *arguments: object) -> None:
    try:
        call(*arguments)
    except ChannelError as error:
        raise RuntimeError(f"CUDA error: {error}") from error  # as torch has it
