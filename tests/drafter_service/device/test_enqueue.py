"""Is nothing waited for while a plan is enqueued, and does garbage from a peer stay where it is?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from drafter_service.device.program import DeviceOptions
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import RowRequest, StepRequest
from engine.errors import ChannelError, IntegrityError, ProtocolError
from kernels.attention.reference_backend import ReferencePlan
from tests.drafter_service.device.harness import DeviceHarness
from tests.drafter_service.harness import prompt_of

MakeEagle3 = Callable[..., Eagle3Speculator]
MakeDevice = Callable[..., DeviceHarness]

# What waits for the device when the tensor is on a GPU.
WAITING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero")


class _Waited(Exception):
    """Something read a tensor back."""


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever reads a tensor back raises, but for the reference kernels whose Triton forms do not."""
    allowed = [False]
    with monkeypatch.context() as patch:
        for name in WAITING:
            original = getattr(torch.Tensor, name)

            def guarded(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
                if not allowed[0]:
                    raise _Waited(_name)
                return _original(self, *args)

            patch.setattr(torch.Tensor, name, guarded)
        for owner, name in (
            (ReferencePlan, "attend"),
            (ReferencePlan, "run_rotating"),
            (torch, "nonzero"),
        ):
            function = getattr(owner, name)

            def permitted(*args: Any, _function: Any = function) -> Any:
                before, allowed[0] = allowed[0], True
                try:
                    return _function(*args)
                finally:
                    allowed[0] = before

            patch.setattr(owner, name, permitted)
        yield


@pytest.mark.parametrize("source", ["build", "reuse"])
@pytest.mark.parametrize("drawn", [False, True])
def test_nothing_is_read_back_while_a_plan_is_enqueued(
    make_eagle3: MakeEagle3, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch, source: str, drawn: bool
) -> None:
    speculator = make_eagle3(metadata_source=source, draft_sampling="probabilistic" if drawn else "greedy")
    harness = make_device(speculator, lookahead=8, draft_probs=drawn)
    for index in range(3):
        harness.add(f"r{index}", prompt_of(5 + index, index), temperature=0.8 * drawn)
    for step in range(4):
        requests = list(harness.target.requests.values())
        rows = harness.target.plan_rows(requests, 4)
        plan_rows = tuple(
            RowRequest(row.request.request_id, 1, step, row.request.context_len, len(row.query)) for row in rows
        )
        seq = harness.target.step(rows)
        plan = StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, plan_rows, 1000)
        with no_waiting(monkeypatch):
            harness.follow(plan)
        harness.settle()
    assert harness.reports[-1].num_drafted == 9


def test_the_guard_sees_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_waiting(monkeypatch), pytest.raises(_Waited):
        _ = bool(torch.ones(1))
    with no_waiting(monkeypatch), pytest.raises(_Waited):
        torch.ones(3).tolist()


GARBAGE: list[tuple[str, int, int]] = [
    ("positions", 1, 2**40),
    ("input_ids", 0, -(2**63)),
    ("input_ids", 2, 2**62),
    ("query_start_loc", 1, 2**31 - 1),
    ("query_start_loc", 1, -7),
    ("query_start_loc", 0, 3),
    ("seq_lens", 0, 2**31 - 1),
    ("seq_lens", 0, -(2**31)),
    ("num_rejected", 0, 99),
    ("num_rejected", 0, -99),
    ("anchors", 0, 2**60),
    ("anchors", 0, -3),
    ("next_prompt_tokens", 0, 10**12),
]


@pytest.mark.parametrize(("name", "index", "value"), GARBAGE)
@pytest.mark.parametrize("source", ["build", "reuse"])
def test_a_peer_s_garbage_stays_in_its_row(
    make_eagle3: MakeEagle3, make_device: MakeDevice, source: str, name: str, index: int, value: int
) -> None:
    """The row, or the whole step, is not followed; what others hold is as before, and the next steps run."""
    speculator = make_eagle3(metadata_source=source)
    harness = make_device(speculator, lookahead=8)
    bad, good = harness.add("bad", prompt_of(5, 1)), harness.add("good", prompt_of(6, 2))
    harness.run(2, 2)
    requests = [bad, good]
    rows = harness.target.plan_rows(requests, 64)
    plan_rows = tuple(RowRequest(r.request.request_id, 1, 2, r.request.context_len, len(r.query)) for r in rows)
    seq = harness.target.step(rows)
    assert harness.target.local is not None
    _, entry = harness.target.local.target.ring(seq)
    getattr(entry, name)[index] = value
    before = speculator.kv.k(0).clone()
    harness.follow(StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, plan_rows, 1000))
    reply = harness.target.channel.take_reply(seq, 0.0)
    assert reply is not None
    assert reply.tokens[0].tolist() == [-1] * 7
    harness.settle()
    changed = torch.nonzero((speculator.kv.k(0) != before).flatten(1).any(dim=1))[:, 0].tolist()
    if source == "build":
        blocks = speculator.placements.blocks
        assert blocks is not None
        assert set(changed) <= set(blocks.blocks(harness.resident("good").seat))
    for request in requests:
        request.drafts = []
    for _ in range(2):
        harness.step(2)
    assert len(bad.drafts) == 0, "a hole is never drafted over"
    speculator.check_integrity()


def test_garbage_in_the_layout_of_reuse_leads_nowhere(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    speculator = make_eagle3(metadata_source="reuse")
    harness = make_device(speculator, lookahead=8)
    request = harness.add("r", prompt_of(5, 1))
    harness.run(2, 2)
    rows = harness.target.plan_rows([request], 64)
    seq = harness.target.step(rows)
    assert harness.target.local is not None
    _, entry = harness.target.local.target.ring(seq)
    entry.slot_mapping[: len(rows[0].query)] = torch.tensor([2**50, -(2**50), 10**9])[: len(rows[0].query)]
    entry.block_tables[0, 2:] = 10**9
    plan_rows = (RowRequest("r", 1, 7, request.context_len, len(rows[0].query)),)
    harness.follow(StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, plan_rows, 1000))
    harness.settle()
    assert not harness.reports[-1].missed


def test_an_entry_overwritten_while_it_is_read_counts_for_nothing(
    make_eagle3: MakeEagle3, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator = make_eagle3()
    harness = make_device(speculator)
    request = harness.add("r", prompt_of(6, 1))
    harness.step(2)
    rows = harness.target.plan_rows([request], 64)
    plan_rows = (RowRequest("r", 1, 2, request.context_len, len(rows[0].query)),)
    seq = harness.target.step(rows)
    program = harness.program
    follow = program.follow

    def overtaken(*args: Any) -> None:
        harness.target.channel.begin(seq + harness.target.spec.depth, 1, 1)
        follow(*args)

    monkeypatch.setattr(program, "follow", overtaken)
    harness.follow(StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, plan_rows, 1000))
    monkeypatch.undo()
    reply = harness.target.channel.take_reply(seq, 0.0)
    assert reply is not None
    assert reply.tokens.tolist() == [[-1] * 7]
    harness.settle()
    assert harness.reports[-1].missed
    assert len(harness.resident("r").tokens) == 7
    request.drafts = []
    assert harness.step(2).cold_request_ids == ("r",)


def test_no_more_steps_under_way_than_there_are_buffers(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3())
    harness.add("r", prompt_of(6, 1))
    for _ in range(8):
        harness.launch(1)
    plan = StepRequest(9, harness.target.spec.channel_id, harness.target.spec.epoch, (), 1000)
    assert not harness.steps.launch(harness.link, plan, harness.reports.append, 0.0)
    harness.settle(1)
    assert harness.steps.launch(harness.link, plan, harness.reports.append, 0.0)
    assert harness.steps.num_under_way == 8
    harness.settle()
    assert harness.steps.num_under_way == 0


@pytest.mark.parametrize("at", ["reply", "wait_entry", "publish_reply"])
def test_a_launch_that_fails_leaves_nothing_half_told(
    make_eagle3: MakeEagle3, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """What a plan would have told the device of its seats is told again: it may never have come to it."""
    harness = make_device(make_eagle3())
    harness.add("old", prompt_of(20, 1))
    harness.run(2, 2)
    seat = harness.resident("old").seat
    harness.remove("old")
    request = harness.add("new", prompt_of(18, 2))
    assert harness.resident("new").seat == seat
    assert harness.target.local is not None

    def refused(*_: object) -> None:
        raise ChannelError("out of order")

    num_free = len(harness.steps._free)
    plan_rows = (RowRequest("new", 1, 2, 0, 18),)
    with monkeypatch.context() as patch:
        patch.setattr(harness.target.local.drafter, at, refused)
        spec = harness.target.spec
        try:
            harness.follow(StepRequest(harness.target.seq + 1, spec.channel_id, spec.epoch, plan_rows, 1000))
        except ChannelError:
            assert at == "reply", "before anything was enqueued"
    harness.settle()
    assert len(harness.steps._free) == num_free
    request.drafts = []
    assert harness.step(2).num_drafted == 2
    blocks = harness.speculator.placements.blocks  # type: ignore[attr-defined]
    told = harness.program.tables.device[seat]
    held = blocks.num_blocks(seat)
    assert told[:held].tolist() == blocks.table_np[seat, :held].tolist()


def test_plans_that_cannot_be(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3())
    spec = harness.target.spec
    many = tuple(RowRequest(f"r{index}", 1, 1, 0, 1) for index in range(spec.max_rows + 1))
    with pytest.raises(ProtocolError, match="rows"):
        harness.follow(StepRequest(1, spec.channel_id, spec.epoch, many, 1000))
    huge = (RowRequest("r", 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),)
    harness.admit(harness.target.add("r", prompt_of(5, 1)), mid_stream=False, max_total_len=2**32 - 1)
    harness.follow(StepRequest(1, spec.channel_id, spec.epoch, huge, 1000))
    harness.settle()
    harness.speculator.check_integrity()
    harness.target.close()
    with pytest.raises(ChannelError):
        harness.follow(StepRequest(2, spec.channel_id, spec.epoch, (), 1000))


def test_the_shadow_sees_a_difference(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3(), DeviceOptions(graph_rows=(4,), shadow=True))
    harness.add("r", prompt_of(6, 1))
    harness.step(2)
    metadata = harness.program._metadata  # type: ignore[attr-defined]
    fill = metadata._fill

    def wrong(taken: Any, out: Any) -> None:
        fill(taken, out)
        out.slots[0, -1] = 3  # of a padded token

    metadata._fill = wrong
    with pytest.raises(IntegrityError, match="metadata"):
        harness.step(2)
