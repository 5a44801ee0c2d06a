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

    def __init__(self, device: torch.device, enabled: bool, counts: MetadataCounts) -> None:
        self._graphs = GraphCache(device, enabled)
        self._counts = counts
        self._made: dict[Hashable, tuple[int, int]] = {}

    @property
    def counts(self) -> GraphCounts:
        """Captures and replays so far."""
        return self._graphs.counts

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run `function` through the key's graph: see GraphCache.run."""
        counts = self._counts
        builds, launches = counts.builds, counts.launches
        called = False

        def call() -> None:
            nonlocal called
            called = True
            self._call(key, function)

        self._graphs.run(key, call)
        if not called:
            made_builds, made_launches = self._made[key]
            counts.builds, counts.launches = builds + made_builds, launches + made_launches

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture ahead of the first run: see GraphCache.capture. Counts nothing."""
        builds, launches = self._counts.builds, self._counts.launches
        self._graphs.capture(key, lambda: self._call(key, function))
        self._counts.builds, self._counts.launches = builds, launches

    def _call(self, key: Hashable, function: Callable[[], None]) -> None:
        builds, launches = self._counts.builds, self._counts.launches
        function()
        self._made[key] = (self._counts.builds - builds, self._counts.launches - launches)
