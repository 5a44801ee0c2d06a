"""How does what the host knows of a step get onto the device in one copy?

Everything is packed into one run of bytes: first the fields of the rows at fixed places, so that a captured graph finds
them, then whatever else the step has (prompt tokens, indices), as much as there is. On the host there is one such
buffer for each step that may be under way: none is written again before its step has come back, so no copy ever reads
what was meant for the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.cuda.copying import DeviceCopies, prepare_copy

_ALIGNMENT = 16

_TORCH: dict[Any, torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}

# Fields of a row, with what they hold where a row is only padding. `_starts`: one element more than there are rows.
FIELDS: dict[str, tuple[Any, float]] = {
    "tag": (np.int64, 0),  # the first element alone: the step's seq, as the ring's tag
    "seeds": (np.int64, 0),
    "next_prompt_tokens": (np.int64, -1),
    "prompt_starts": (np.int64, 0),
    "seats": (np.int32, -1),
    "places": (np.int32, -1),
    "query_lens": (np.int32, 0),
    "limits": (np.int32, 0),
    "known_lens": (np.int32, -1),
    "batch_starts": (np.int32, 0),
    "logit_starts": (np.int32, 0),
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "match_only": (np.bool_, 0),
    "is_prompt": (np.bool_, 0),
}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class HostPlan:
    """One host buffer. `rows`: the rows' fields, numpy arrays of max_rows + 1 elements. Used by one thread."""

    def __init__(self, memory: torch.Tensor, offsets: dict[str, int], max_rows: int, tail: int) -> None:
        self.memory = memory
        bytes_np: np.ndarray = memory.numpy()
        self.rows = {
            name: bytes_np[offsets[name] : offsets[name] + (max_rows + 1) * np.dtype(dtype).itemsize].view(dtype)
            for name, (dtype, _) in FIELDS.items()
        }
        for name, (_, padding) in FIELDS.items():
            self.rows[name][:] = padding
        self._bytes = bytes_np
        self._padding = bytes_np[:tail].copy()
        self._tail = tail
        self.used = tail

    def clear(self) -> None:
        """Begin a step: all rows are padding, nothing is behind them."""
        self._bytes[: self._tail] = self._padding
        self.used = self._tail

    def add(self, array: np.ndarray) -> int | None:
        """Put an array behind the rest; where it begins, in bytes. None: there is no room."""
        begin, size = self.used, array.nbytes
        if begin + size > self._bytes.shape[0]:
            return None
        self._bytes[begin : begin + size].view(array.dtype)[:] = array
        self.used = _aligned(begin + size)
        return begin


class PlanBuffer:
    """The device's buffer, and the host's. `rows`: the rows' fields as tensors on the device, max_rows + 1 elements.

    The device has one: the next step's copy comes after this step's kernels, by the order of the stream. `host`: those
    of the steps under way; `blank`: one without rows, which nobody changes. `copies`: from here to elsewhere on it.
    """

    def __init__(self, max_rows: int, tail_bytes: int, num_host: int, device: torch.device) -> None:
        offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, _) in FIELDS.items():
            offsets[name] = end
            end = _aligned(end + (max_rows + 1) * np.dtype(dtype).itemsize)
        self.device = device
        self.copies = DeviceCopies(device)
        size = end + _aligned(tail_bytes)
        pinned = device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.rows = {
            name: self._view(offsets[name], max_rows + 1, _TORCH[np.dtype(dtype)])
            for name, (dtype, _) in FIELDS.items()
        }
        self._first: dict[int, dict[str, torch.Tensor]] = {}
        plans = [
            HostPlan(torch.zeros(size, dtype=torch.uint8, pin_memory=pinned), offsets, max_rows, end)
            for _ in range(num_host + 1)
        ]
        self.blank, self.host = plans[0], plans[1:]
        self._uploads = {id(plan): prepare_copy(self._memory, plan.memory) for plan in plans}

    def first(self, num_rows: int) -> dict[str, torch.Tensor]:
        """The fields of the first num_rows rows; views that are made once."""
        views = self._first.get(num_rows)
        if views is None:
            views = self._first[num_rows] = {name: field[:num_rows] for name, field in self.rows.items()}
        return views

    def upload(self, plan: HostPlan) -> None:
        """Enqueue the copy of what a host buffer holds. The caller leaves it alone until the step has come back."""
        self._uploads[id(plan)](plan.used)

    def added(self, plan: HostPlan, array: np.ndarray) -> torch.Tensor:
        """An array of the step, on the device once the plan has been uploaded: with it where there is room, else by a
        copy of its own.
        """
        begin = plan.add(array)
        if begin is None:
            return to_device(array, self.device)
        return self._view(begin, array.shape[0], _TORCH[array.dtype])

    def _view(self, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device that does not wait for it: torch keeps the pinned memory until the copy is done."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
