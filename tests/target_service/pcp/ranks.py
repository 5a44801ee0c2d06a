"""How do tests run ranks without processes, and graphs without a GPU?

`ThreadRanks`: a group whose ranks are threads of this process and whose collectives copy through a shared list. Every
wait has a deadline, and shapes that differ between ranks fail, as they would hang elsewhere. `CpuGraphs`: a GraphCache
that calls again what was captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from engine.graphs import GraphCache
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


class CpuGraphs(GraphCache):
    """A GraphCache whose replays call the function that was captured, with what it kept, and not the one that came.

    happened: what became of which key, in turn: `warm` (run once), `ahead` (run, to be captured), `capture`, `replay`,
    `evict`. seen: the keys of all that ran.
    """

    def __init__(self, max_graphs: int = 1000) -> None:
        super().__init__("cpu", max_graphs)
        self.enabled = True
        self.seen: set[Any] = set()
        self.happened: list[tuple[str, Hashable]] = []
        self._kept: list[Hashable] = []

    def run(self, key: Hashable, function: Callable[[], ResultT]) -> ResultT:
        self.seen.add(key)
        return super().run(key, function)

    def capture(self, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        self.happened.append(("ahead", key))
        super().capture(key, function, warm_ups)

    def _note_warm(self, key: Hashable) -> None:
        self.happened.append(("warm", key))
        super()._note_warm(key)

    def _on_side_stream(self, function: Callable[[], ResultT]) -> ResultT:
        return function()

    def _mark(self) -> Callable[[], bool]:
        return lambda: True

    def _record(self, key: Hashable, function: Callable[[], object]) -> Any:
        made: list[Any] = [None, None]

        def replay() -> None:
            self.happened.append(("replay", key))
            made[1] = function()

        made[0] = SimpleNamespace(replay=replay)
        self.counts.captures += 1
        self.happened.append(("capture", key))
        self._warm.pop(key, None)
        self.counts.evictions += self._graphs.add(key, cast(Any, made), self._mark)
        self._kept.append(key)
        for gone in [kept for kept in self._kept if kept not in self]:
            self._kept.remove(gone)
            self.happened.append(("evict", gone))
        return made
