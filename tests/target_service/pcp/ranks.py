"""How do tests run ranks without processes, and graphs without a GPU?

`ThreadRanks`: a group whose ranks are threads of this process and whose collectives copy through a shared list. Every
wait has a deadline, and shapes that differ between ranks fail, as they would hang elsewhere. `CpuGraphs`: what a
GraphCache does on a GPU, by calling again what was captured.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from engine.graphs import GraphCounts
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


class CpuGraphs:
    """A GraphCache whose replays call the function that was captured, with what it kept, and not the one that came.

    max_graphs: beyond it the one used least recently goes. seen: the keys of all that ran.
    """

    enabled = True

    def __init__(self, max_graphs: int = 1000) -> None:
        self.counts = GraphCounts()
        self.seen: set[Any] = set()
        self._max_graphs = max_graphs
        self._kept: OrderedDict[Hashable, Callable[[], Any]] = OrderedDict()
        self._warm: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def run(self, key: Hashable, function: Callable[[], ResultT]) -> ResultT:
        self.seen.add(key)
        if key not in self._kept:
            if key not in self._warm:
                self._warm.add(key)
                self.counts.eager_runs += 1
                return function()
            self._keep(key, function)
        self._kept.move_to_end(key)
        self.counts.replays += 1
        result: ResultT = self._kept[key]()
        return result

    def capture(self, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        if key not in self._kept:
            for _ in range(warm_ups):
                function()
            self._keep(key, function)

    def clear(self) -> None:
        self._kept.clear()
        self._warm.clear()

    def _keep(self, key: Hashable, function: Callable[[], Any]) -> None:
        self.counts.captures += 1
        self._kept[key] = function
        if len(self._kept) > self._max_graphs:
            self._kept.popitem(last=False)
