"""How do tests run ranks without processes?

`ThreadRanks`: a group whose ranks are threads of this process and whose collectives copy through a shared list. Every
wait has a deadline, and shapes that differ between ranks fail, as they would hang elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from target_service.pcp.group import PendingWork

DEADLINE_S = 20.0
ResultT = TypeVar("ResultT")


class ThreadRanks:
    """`size` ranks. `calls` counts each rank's collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = [0] * size
        self._barrier = threading.Barrier(size)
        self._parts: list[torch.Tensor | None] = [None] * size

    def run(self, act: Callable[[ThreadGroup], ResultT]) -> list[ResultT]:
        """`act` on every rank at once; the ranks' results, in order."""

        def guarded(rank: int) -> ResultT:
            try:
                return act(ThreadGroup(self, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(guarded, range(self.size)))

    def exchange(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        self.calls[rank] += 1
        self._parts[rank] = local
        self._barrier.wait(DEADLINE_S)
        parts = [part for part in self._parts if part is not None]
        assert len({part.shape for part in parts}) == 1, [part.shape for part in parts]
        gathered = torch.cat(parts)
        self._barrier.wait(DEADLINE_S)
        return gathered


class ThreadGroup:
    """One rank of ThreadRanks; a RankGroup. An all-gather's output appears only when it is waited for."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def start_all_gather(self, out: torch.Tensor, local: torch.Tensor) -> PendingWork:
        gathered = self._ranks.exchange(self.rank, local)
        out.fill_(float("nan"))
        return _Copy(out, gathered)

    def gather(self, local: torch.Tensor) -> torch.Tensor | None:
        gathered = self._ranks.exchange(self.rank, local)
        return gathered if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        gathered = self._ranks.exchange(self.rank, tensor)
        tensor.copy_(gathered[: tensor.shape[0]])


class _Copy:
    def __init__(self, out: torch.Tensor, gathered: torch.Tensor) -> None:
        self._out = out
        self._gathered = gathered

    def wait(self) -> object:
        return self._out.copy_(self._gathered)
