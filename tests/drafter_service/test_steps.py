"""What becomes of steps whose entries are late, lost, overwritten or nonsense?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.entries import check_entry, copy_entry
from drafter_service.messages import RowRequest, StepRequest
from drafter_service.ngram import NgramSpeculator
from engine.channel.interface import RingEntry
from engine.errors import ChannelError
from tests.drafter_service.conftest import LAYERS, SETTINGS
from tests.drafter_service.harness import Harness, prompt_of

MakeHarness = Callable[..., Harness]


def plan_of(harness: Harness, seq: int, draft_len: int = 3, deadline_ms: int = 50, ahead: int = 0) -> StepRequest:
    rows = tuple(RowRequest(request_id, 1, draft_len) for request_id in harness.target.requests)
    return StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, rows, deadline_ms, ahead)


def test_an_entry_that_never_comes_is_answered_so_that_the_target_need_not_wait(make_harness: MakeHarness) -> None:
    harness = make_harness(NgramSpeculator(1, 3, 7))
    harness.add("r", prompt_of(6, 1))
    plan = plan_of(harness, 1)
    pending = harness.runner.begin(plan)
    assert harness.runner.try_step(harness.link, pending, later_plans=0, slice_s=0.01) is None
    # The next plan is there: the plan's own deadline counts from here.
    while (report := harness.runner.try_step(harness.link, pending, later_plans=1, slice_s=0.01)) is None:
        pass
    assert report.missed
    assert report.times.wait_ms < 2000
    reply = harness.target.channel.take_reply(1, 0.0)
    assert reply is not None
    assert reply.tokens.tolist() == [[-1] * 7]


def test_a_closed_channel_ends_the_wait_at_once(make_harness: MakeHarness) -> None:
    harness = make_harness(NgramSpeculator(1, 3, 7))
    harness.add("r", prompt_of(6, 1))
    pending = harness.runner.begin(plan_of(harness, 1))
    closing = threading.Timer(0.1, harness.target.channel.close)
    closing.start()
    report = harness.runner.try_step(harness.link, pending, later_plans=0, slice_s=4.0)
    closing.join()
    assert report is not None
    assert report.missed
    assert report.times.wait_ms < 2000


def test_drafts_that_come_too_late_are_not_made(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(6, 1))
    seq = harness.target.step(harness.target.plan_rows([request], 64))
    report = harness.follow(plan_of(harness, seq), later_plans=2)
    assert report.num_drafted == 0
    assert not report.missed
    assert eagle3.placements.extent(harness.resident("r")) == (0, 6)


def test_plans_sent_ahead_hurry_nobody(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    """With two plans ahead of the verdicts, the third behind a step is the first that says that its entry is there."""
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(6, 1))
    pending = harness.runner.begin(plan_of(harness, 1, deadline_ms=0, ahead=2))
    for later_plans in (1, 2):
        assert harness.runner.try_step(harness.link, pending, later_plans, slice_s=0.01) is None
    seq = harness.target.step(harness.target.plan_rows([request], 64))
    report = harness.runner.try_step(harness.link, pending, later_plans=3, slice_s=0.01)
    assert report is not None
    assert report.num_drafted == 3, "the target has not gone past these drafts"
    assert seq == 1
    pending = harness.runner.begin(plan_of(harness, 2, deadline_ms=0, ahead=2))
    report = harness.runner.try_step(harness.link, pending, later_plans=3, slice_s=0.01)
    assert report is not None
    assert report.missed, "its verdict is known, and it was never published"


def test_an_entry_overwritten_while_it_is_read_changes_nothing(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(6, 1))
    harness.step(0)
    before = eagle3.kv.k(0).clone()
    seq = harness.target.step(harness.target.plan_rows([request], 64))

    def overtaken(shared: RingEntry, with_hidden: bool, with_layout: bool) -> RingEntry:
        copied = copy_entry(shared, with_hidden, with_layout)
        harness.target.channel.begin(seq + harness.target.spec.depth, 1, 1)
        return copied

    monkeypatch.setattr("drafter_service.steps.copy_entry", overtaken)
    report = harness.follow(plan_of(harness, seq))
    assert report.missed
    assert torch.equal(eagle3.kv.k(0), before)
    assert len(harness.resident("r").tokens) == 7


def test_unknown_requests_and_epochs_are_told(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    harness = make_harness(eagle3)
    known, unknown = harness.add("known", prompt_of(6, 1)), harness.target.add("unknown", prompt_of(5, 2))
    older = harness.target.add("older", prompt_of(5, 3))
    harness.admit(older, mid_stream=False, epoch=2)
    report = harness.step(2)
    assert report is not None
    assert set(report.cold_request_ids) == {"unknown", "older"}
    assert (len(known.drafts), unknown.drafts, older.drafts) == (2, [], [])
    report = harness.step(0)
    assert report is not None
    assert report.cold_request_ids == ()  # nobody wants drafts for them


def entry_of(harness: Harness) -> RingEntry:
    request = next(iter(harness.target.requests.values()))
    seq = harness.target.step(harness.target.plan_rows([request], 64))
    shared = harness.channel.take_entry(seq, 0.0)
    assert shared is not None
    return copy_entry(shared, with_hidden=True, with_layout=True)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("query_start_loc", 1, 3),
        ("query_start_loc", 0, 1),
        ("seq_lens", 0, 2),
        ("num_rejected", 0, 6),
        ("num_rejected", 0, -1),
        ("input_ids", 2, 512),
        ("input_ids", 2, -1),
        ("anchors", 0, 9999),
        ("next_prompt_tokens", 0, -2),
        ("positions", 1, 4),
        ("slot_mapping", 1, 512 * 4),
        ("slot_mapping", 1, -2),
        ("block_tables", (0, 1), 512),
        ("block_tables", (0, 1), -1),
    ],
)
def test_nonsense_in_an_entry_is_named(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, name: str, index: int | tuple[int, int], value: int
) -> None:
    harness = make_harness(eagle3)
    harness.add("r", prompt_of(6, 1))
    entry = entry_of(harness)
    check_entry(entry, harness.channel.spec, 1)
    getattr(entry, name)[index] = value
    with pytest.raises(ChannelError, match=name):
        check_entry(entry, harness.channel.spec, 1)


def test_a_nonsense_entry_is_a_missed_step(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    harness = make_harness(eagle3)
    harness.add("r", prompt_of(6, 1))
    harness.target.add("s", prompt_of(6, 1))
    request = harness.target.requests["r"]
    seq = harness.target.step(harness.target.plan_rows([request], 64))
    report = harness.follow(plan_of(harness, seq))  # two rows planned, one in the entry
    assert report.missed
    eagle3.check_integrity()


def test_garbage_in_the_layout_of_reuse_is_a_missed_step(make_harness: MakeHarness, head: Eagle3Head) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, metadata_source="reuse"))
    harness = make_harness(speculator, lookahead=8)
    request = harness.add("r", prompt_of(6, 1))
    seq = harness.target.step(harness.target.plan_rows([request], 64))
    shared = harness.channel.take_entry(seq, 0.0)
    assert shared is not None
    shared.slot_mapping[2] = 2**50
    before = speculator.kv.k(0).clone()
    assert harness.follow(plan_of(harness, seq)).missed
    assert torch.equal(speculator.kv.k(0), before)


def test_an_entry_that_is_overwritten_already_is_not_waited_for(make_harness: MakeHarness) -> None:
    harness = make_harness(NgramSpeculator(1, 3, 7))
    request = harness.add("r", prompt_of(6, 1))
    plan = plan_of(harness, 1)
    for _ in range(harness.target.spec.depth + 1):
        harness.target.step(harness.target.plan_rows([request], 64))
    pending = harness.runner.begin(plan)
    report = harness.runner.try_step(harness.link, pending, later_plans=0, slice_s=0.02)
    assert report is not None
    assert report.missed
