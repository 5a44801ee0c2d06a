"""Are builds counted when a graph is replayed, and is a waiting device thread woken for a step that is done?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

import pytest
import torch

from drafter_service.device.counted_graphs import CountedGraphs
from drafter_service.device.metadata import MetadataCounts
from drafter_service.streams import Inboxes
from engine.graphs import GraphCache


def test_a_replay_counts_as_the_call_it_was_captured_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Hashable] = set()

    def replaying(self: GraphCache, key: Hashable, function: Callable[[], None]) -> None:
        if key not in seen:
            function()
        seen.add(key)

    monkeypatch.setattr(GraphCache, "run", replaying)
    counts = MetadataCounts()
    graphs = CountedGraphs(torch.device("cpu"), True, counts)
    calls: list[str] = []

    def prefill() -> None:
        calls.append("prefill")
        counts.builds += 1
        counts.launches += 2

    for expected in (1, 2, 3):
        graphs.run("prefill", prefill)
        graphs.run("draft", lambda: calls.append("draft"))
        assert (counts.builds, counts.launches) == (expected, 2 * expected)
    assert calls == ["prefill", "draft"]


def test_capturing_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: GraphCache, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        function()
        function()

    monkeypatch.setattr(GraphCache, "capture", capture)
    monkeypatch.setattr(GraphCache, "run", lambda self, key, function: None)
    counts = MetadataCounts()
    graphs = CountedGraphs(torch.device("cpu"), True, counts)

    def prefill() -> None:
        counts.builds += 1

    graphs.capture("prefill", prefill)
    assert counts.builds == 0
    graphs.run("prefill", prefill)
    assert counts.builds == 1


def test_a_nudge_wakes_whoever_waits() -> None:
    inboxes = Inboxes(4)
    threading.Timer(0.05, inboxes.nudge).start()
    started = time.monotonic()
    assert inboxes.heads(20.0) == []
    assert time.monotonic() - started < 10.0
    inboxes.nudge()  # while nobody waits: the next look is at once
    assert inboxes.heads(20.0) == []
    assert time.monotonic() - started < 10.0
