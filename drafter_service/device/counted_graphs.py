"""How many metadata builds did a step take, when a graph was replayed and nothing of ours was called?

As many as the captured function made when it was called: what it enqueued then is what a replay runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from drafter_service.device.metadata import MetadataCounts
from engine.graphs import GraphCache, GraphCounts


class CountedGraphs:
    """A GraphCache whose replays are counted in `counts` as the calls were. Used by one thread."""

    def __init__(self, device: torch.device, max_graphs: int, enabled: bool, counts: MetadataCounts) -> None:
        self._graphs = GraphCache(device, max_graphs, enabled)
        self._counts = counts

    @property
    def counts(self) -> GraphCounts:
        """Captures and replays so far."""
        return self._graphs.counts

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run `function` through the key's graph: see GraphCache.run."""
        builds, launches = self._counts.builds, self._counts.launches
        # The result of a replay is that of the call which was captured.
        made_builds, made_launches = self._graphs.run(key, lambda: self._call(function))
        self._counts.builds, self._counts.launches = builds + made_builds, launches + made_launches

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture ahead of the first run: see GraphCache.capture. Counts nothing."""
        builds, launches = self._counts.builds, self._counts.launches
        self._graphs.capture(key, lambda: self._call(function))
        self._counts.builds, self._counts.launches = builds, launches

    def _call(self, function: Callable[[], None]) -> tuple[int, int]:
        """Returns the builds and launches that the call made."""
        builds, launches = self._counts.builds, self._counts.launches
        function()
        return self._counts.builds - builds, self._counts.launches - launches
