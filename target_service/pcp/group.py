"""How do ranks exchange tensors?

`RankGroup` is all that the sharded forward needs: an all-gather that is started and waited for, a gather to rank 0,
and a broadcast from it. `TorchGroup` is torch.distributed, NCCL between GPUs and gloo elsewhere; every collective ends
by its timeout.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

Backend = Literal["gloo", "nccl"]


class PendingWork(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Until its output may be used: by the host on a CPU, by the current stream on a GPU."""
        ...


class RankGroup(Protocol):
    """The ranks of one target. Every rank calls the same collectives in the same order with the same shapes.

    rank: 0 .. size - 1.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def start_all_gather(self, out: torch.Tensor, local: torch.Tensor) -> PendingWork:
        """out: [size * n, ...]; local: [n, ...], contiguous. Both must stay untouched until waited for."""
        ...

    def gather(self, local: torch.Tensor) -> torch.Tensor | None:
        """local: [n, ...]. Returns [size * n, ...] on rank 0, None on the others."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, contiguous, to all others, in place."""
        ...


class TorchGroup:
    """torch.distributed's default group, for the one target of this process."""

    def __init__(
        self,
        rank: int,
        size: int,
        backend: Backend,
        port: int,
        device: torch.device,
        join_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """Meet the other ranks at `port` of this host, which rank 0 holds (see `rendezvous`). timeout_s: of every
        collective. Raises whatever torch.distributed does when the others do not come within join_timeout_s.
        """
        self.rank = rank
        self.size = size
        # Newer versions warn of the older name.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for name, value in _one_host_environment(backend).items():
            os.environ.setdefault(name, value)
        store = TCPStore(
            "127.0.0.1", port, size, is_master=False, timeout=timedelta(seconds=join_timeout_s), wait_for_workers=False
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend == "nccl" else None,  # NCCL then connects here, not in the first step
        )

    def start_all_gather(self, out: torch.Tensor, local: torch.Tensor) -> PendingWork:
        """See RankGroup."""
        work: PendingWork = self._all_gather(out, local, async_op=True)
        return work

    def gather(self, local: torch.Tensor) -> torch.Tensor | None:
        """See RankGroup."""
        if self.rank != 0:
            dist.gather(local, None, dst=0)
            return None
        gathered = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        dist.gather(local, list(gathered.chunk(self.size)), dst=0)
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See RankGroup."""
        dist.broadcast(tensor, src=0)

    def close(self) -> bool:
        """Leave the group: all ranks at the same time, since over NCCL each waits until the others have closed their
        connections to it, without a deadline. Nothing that holds its collectives may still run, or be kept.

        False: it could not be left, and this process must not come to the interpreter's end, which would try again.
        """
        with contextlib.suppress(RuntimeError):  # a peer that has gone first is no news at the end
            dist.destroy_process_group()
        return not dist.is_initialized()


def rendezvous(size: int, timeout_s: float) -> TCPStore:
    """The place where the ranks meet, at a free port of this host; rank 0 keeps it for as long as the group lives."""
    return TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def choose_backend(wanted: str, device: torch.device, num_ranks: int) -> Backend:
    """`auto`: NCCL where every rank has a GPU to itself, else gloo. ValueError where `nccl` cannot be."""
    has_gpus = device.type == "cuda" and torch.cuda.device_count() - (device.index or 0) >= num_ranks
    if wanted == "nccl" and not has_gpus:
        raise ValueError(f"nccl needs a GPU for each of the {num_ranks} ranks")
    return "nccl" if has_gpus and wanted != "gloo" else "gloo"


def rank_device(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: the GPUs from `device` on in turn; ranks share them where there are too few."""
    if device.type != "cuda":
        return device
    first = device.index or 0
    return torch.device("cuda", first + rank % max(1, torch.cuda.device_count() - first))


class Watch(Protocol):
    """Who measures what stands in collectives."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Counts what is inside."""
        ...


class Stopwatch:
    """How long did this rank stand in collectives? On a GPU between events of the current stream: nothing here waits
    for the device. new_event: makes such an event.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is inside."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = self._new_event(), self._new_event()
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def take_ms(self) -> float:
        """Milliseconds since the last call. On a GPU: of what the device has done by now. A step that samples nothing
        is not waited for, so its collectives may count towards a later one.
        """
        milliseconds = self._seconds * 1e3
        self._seconds = 0.0
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            milliseconds += first.elapsed_time(last)
        return milliseconds

    def reset(self) -> None:
        """Count from now on."""
        self._seconds = 0.0
        self._events.clear()


class SoloGroup:
    """A RankGroup of one, which waits for nobody."""

    rank = 0
    size = 1

    def start_all_gather(self, out: torch.Tensor, local: torch.Tensor) -> PendingWork:
        """See RankGroup."""
        out.copy_(local)
        return _Done()

    def gather(self, local: torch.Tensor) -> torch.Tensor | None:
        """See RankGroup."""
        return local

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See RankGroup."""


class _Done:
    def wait(self) -> object:
        return None


def _one_host_environment(backend: Backend) -> dict[str, str]:
    """The ranks are processes of one host. NVLink multicast stays off: a fault in it takes the whole host's GPUs. Nor
    are buffers of captured collectives registered: that is a handshake inside each capture, and what ranks capture at
    the same step they need not capture at the same time.
    """
    if backend == "gloo":
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}
