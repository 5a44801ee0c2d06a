"""Are builds counted when a graph is replayed, and is a waiting device thread woken for a step that is done?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

import pytest
import torch

from drafter_service.device.base import MAX_VOCABULARIES
from drafter_service.device.counted_graphs import CountedGraphs
from drafter_service.device.making import make_program
from drafter_service.device.metadata import MetadataCounts
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.speculator import Speculator
from drafter_service.streams import Inboxes
from engine.decoder import Decoder
from engine.graphs import GraphCache
from tests.drafter_service.device.conftest import REFERENCE
from tests.drafter_service.device.harness import ALL_SIZES


def test_a_replay_counts_as_the_call_it_was_captured_from(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[Hashable, object] = {}

    def replaying(self: GraphCache, key: Hashable, function: Callable[[], object]) -> object:
        if key not in made:
            made[key] = function()
        return made[key]

    monkeypatch.setattr(GraphCache, "run", replaying)
    counts = MetadataCounts()
    graphs = CountedGraphs(torch.device("cpu"), 8, True, counts)
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
    made: dict[Hashable, object] = {}

    def capture(self: GraphCache, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        function()
        made[key] = function()

    monkeypatch.setattr(GraphCache, "capture", capture)
    monkeypatch.setattr(GraphCache, "run", lambda self, key, function: made[key])
    counts = MetadataCounts()
    graphs = CountedGraphs(torch.device("cpu"), 8, True, counts)

    def prefill() -> None:
        counts.builds += 1

    graphs.capture("prefill", prefill)
    assert counts.builds == 0
    graphs.run("prefill", prefill)
    assert counts.builds == 1


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_all_that_a_drafter_captures_at_the_start_is_kept(
    method: str, make_eagle3: Callable[..., Speculator], decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as much again for each size of vocabulary that may come."""
    captured: dict[Hashable, int] = {}

    def capture(self: GraphCache, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        captured[key] = self.max_graphs

    monkeypatch.setattr(GraphCache, "capture", capture)
    speculator = make_eagle3() if method == "eagle3" else DraftModelSpeculator(decoder, REFERENCE)
    program = make_program(speculator, ALL_SIZES)
    program.warm_up()
    assert set(captured.values()) == {MAX_VOCABULARIES * len(captured)}


def test_a_nudge_wakes_whoever_waits() -> None:
    inboxes = Inboxes(4)
    threading.Timer(0.05, inboxes.nudge).start()
    started = time.monotonic()
    assert inboxes.heads(20.0) == []
    assert time.monotonic() - started < 10.0
    inboxes.nudge()  # while nobody waits: the next look is at once
    assert inboxes.heads(20.0) == []
    assert time.monotonic() - started < 10.0
