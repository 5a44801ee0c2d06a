"""What is found late: releases, preemption, starvation and ends of streams with steps under way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from target_service.flights import Flight
from target_service.messages import FaultReply, RowRequest, RowStatus, SamplingSettings, StepReply, StepRequest
from tests.target_service.device.bench import Bench, Planner, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter
from tests.target_service.device.test_equality import known_of, make_requests


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Bench:
    return Bench(tiny_dir, "host", num_blocks=128)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(tiny_dir: Path, host: Bench, seed: int) -> None:
    """Requests come, are preempted with steps under way, come again in a new epoch, leave; few blocks and seats."""
    chance = random.Random(seed)
    requests = make_requests(10, seed=seed + 300)
    expected = outputs_without_drafts(host, requests)
    bench = Bench(tiny_dir, num_blocks=9, num_seats=5, channel_depth=chance.choice([2, 4]))
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Planner(bench, chance.choice([2, 3, 4]), chunk=chance.choice([5, 64]), overplan=chance.random() < 0.5)
    waiting, placed, left = list(requests), list[Request](), list[Request]()
    starved = 0
    while waiting or placed:
        if waiting and len(placed) < 3 and chance.random() < 0.5:
            request = waiting.pop(0)
            planner.place(request)
            placed.append(request)
        for request in [request for request in placed if request.done]:
            bench.release(request.request_id, request.epoch)
            placed.remove(request)
        if placed and chance.random() < 0.08:
            request = placed.pop(chance.randrange(len(placed)))
            bench.release(request.request_id, request.epoch)
            if chance.random() < 0.3:
                left.append(request)  # its client is gone
                request.epoch = -1
            else:
                request.epoch += 1
                waiting.append(request)
        active = [request for request in placed if planner.can_plan(request)]
        if active and len(planner.under_way) < planner.depth:
            step = planner.launch(active)
            drafter.answer(step, drafter.look(step))
        elif planner.under_way:
            before = len(planner.statuses)
            planner.take()
            if RowStatus.STARVED in planner.statuses[before:]:
                starved += 1
                youngest = placed[-1]
                if len(placed) > 1:
                    bench.release(youngest.request_id, youngest.epoch)
                    youngest.epoch += 1
                    placed.remove(youngest)
                    waiting.append(youngest)
    planner.drain()
    for request in requests:
        if request in left:
            assert request.generated == expected[request.request_id][: len(request.generated)]
        else:
            assert request.generated == expected[request.request_id], request
    bench.assert_free()


def test_a_release_frees_seat_and_blocks_at_once_and_whoever_gets_them_is_right(tiny_dir: Path, host: Bench) -> None:
    """The steps under way still write there; what is launched later comes after them."""
    first = Request("first", list(range(50, 80)), 20, draft_len=7)
    second = Request("second", list(range(90, 125)), 12)
    expected = outputs_without_drafts(host, [first, second])
    bench = Bench(tiny_dir, num_blocks=4, num_seats=1, prefix_caching=False)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of([first, second], expected))
    planner = Planner(bench, 4, chunk=64)
    planner.place(first)
    for _ in range(4):
        step = planner.launch([first])
        drafter.answer(step, drafter.look(step))
    assert len(planner.under_way) == 4
    bench.release("first")
    assert bench.engine.sessions.capacity.free_blocks == 4
    planner.place(second)  # the same seat, the same blocks
    planner.depth = 8
    while not second.done:
        if planner.can_plan(second) and len(planner.under_way) < 7:
            planner.launch([second])
        else:
            planner.take()
    planner.drain()
    assert second.generated == expected["second"]
    # The verdicts of the released one came all the same: they were sent before anybody knew.
    assert first.generated == expected["first"][: len(first.generated)]
    assert len(first.generated) > 8
    bench.release("second")
    bench.assert_free()


def test_what_would_starve_by_bounds_waits_for_the_truth(
    tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are all wrong the bounds run far ahead; the blocks are enough for what really is there."""
    requests = [Request("a", list(range(60, 70)), 50, draft_len=7), Request("b", list(range(70, 80)), 50, draft_len=7)]
    expected = outputs_without_drafts(host, requests)
    bench = Bench(tiny_dir, num_blocks=5, prefix_caching=False)  # by bounds three each, in truth two each
    assert bench.local is not None
    settled: list[int] = []
    settle = bench.core.settle

    def seen() -> None:
        settled.append(bench.core.in_flight)
        settle()

    monkeypatch.setattr(bench.core, "settle", seen)
    drafter = LocalDrafter(bench.local, known_of(requests, expected), lambda row, position, drafts: [3] * 7)
    planner = Planner(bench, 4)
    for request in requests:
        planner.place(request)
    while any(len(request.generated) < 15 for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if active and len(planner.under_way) < planner.depth:
            step = planner.launch(active)
            drafter.answer(step, drafter.look(step))
        else:
            planner.take()
    planner.drain()
    assert set(planner.statuses) == {RowStatus.OK}
    assert len(settled) > 2
    assert min(settled) > 0
    for request in requests:
        assert request.generated == expected[request.request_id][: len(request.generated)]
        bench.release(request.request_id)
    bench.assert_free()


def test_starvation(tiny_dir: Path, host: Bench) -> None:
    """As with host execution: a chunk without blocks starves, what follows on it is skipped, and it goes on later."""
    holder, request = Request("holder", list(range(10, 60)), 2), Request("b", list(range(70, 110)), 6)
    expected = outputs_without_drafts(host, [request])
    bench = Bench(tiny_dir, num_blocks=5, prefix_caching=False)
    planner = Planner(bench, 4, chunk=64)
    planner.place(holder)
    planner.launch([holder])
    planner.take()
    planner.chunk = 16
    planner.place(request)
    for _ in range(4):
        planner.launch([request])
    planner.statuses.clear()
    replies = [planner.take() for _ in range(4)]
    assert planner.statuses == [RowStatus.OK, RowStatus.STARVED, RowStatus.SKIPPED, RowStatus.SKIPPED]
    assert [reply.rows[0].context_len for reply in replies] == [16, 16, 16, 16]
    bench.release("holder")
    planner.run([request])
    assert request.generated == expected["b"]
    bench.release("b")
    bench.assert_free()


def test_the_end_of_a_stream_with_steps_under_way(tiny_dir: Path) -> None:
    requests = make_requests(4, seed=1, draft_len=3)
    bench = Bench(tiny_dir)
    planner = Planner(bench, 4)
    for request in requests:
        planner.place(request)
    for _ in range(4):
        planner.launch(requests)
    bench.core.end_stream(bench.stream)
    assert len(bench.engine.sessions) == 0
    assert bench.core.in_flight == 4
    with torch.inference_mode():
        bench.core.settle()
    assert all(isinstance(flight.reply, StepReply) for _, _, flight in planner.under_way if isinstance(flight, Flight))
    bench.assert_free()


def test_no_more_steps_are_under_way_than_may_be(tiny_dir: Path) -> None:
    bench = Bench(tiny_dir, channel_depth=2)
    request = Request("a", [5, 6, 7], 30)
    planner = Planner(bench, 9)
    planner.place(request)
    for count in range(6):
        planner.launch([request])
        assert bench.core.in_flight == min(count + 1, 2)
    first = planner.under_way[0][2]
    assert isinstance(first, Flight)
    assert first.reply is not None
    planner.drain()
    bench.release("a")
    bench.assert_free()


def test_a_lockstep_plan_is_held_to_exact_lengths(tiny_dir: Path, host: Bench) -> None:
    request = Request("a", [5, 6, 7], 30, draft_len=3)
    expected = outputs_without_drafts(host, [request])
    bench = Bench(tiny_dir)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of([request], expected), lambda row, position, drafts: drafts[:1])
    planner = Planner(bench, 3)
    planner.place(request)
    for _ in range(3):
        step = planner.launch([request])
        drafter.answer(step, drafter.look(step))
    # Three tokens of prompt, then [anchor, draft] twice, of up to four tokens each.
    planner.seq += 1
    row = RowRequest("a", 1, 11, 1, 0, 0, True)
    fault = bench.send(StepRequest(planner.seq, "", 0, (row,), 0, 100, ahead=0))
    assert isinstance(fault, FaultReply)
    assert fault.detail == "rows[0].context_len: 11, but 7 tokens are committed"
    planner.drain()
    assert request.context_len == 7
    bench.release("a")
    bench.assert_free()


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "seeded": True}])
def test_rows_planned_past_the_end_are_skipped_and_told_to_nobody(
    tiny_dir: Path, host: Bench, settings: dict[str, Any]
) -> None:
    """The host finds out late that the request had all its tokens; the device knew."""
    request = Request("a", [5, 6, 7], 9, SamplingSettings(**settings), draft_len=7)
    expected = outputs_without_drafts(host, [request])
    bench = Bench(tiny_dir)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of([request], expected))
    planner = Planner(bench, 4, overplan=True)
    planner.place(request)
    for _ in range(4):
        step = planner.launch([request])
        drafter.answer(step, drafter.look(step))
    assert [len(entry["positions"]) for entry in drafter.seen] == [3, 8, 0, 0]
    planner.drain()
    assert planner.statuses == [RowStatus.OK, RowStatus.OK, RowStatus.SKIPPED, RowStatus.SKIPPED]
    assert request.generated == expected["a"]
    bench.release("a")
    bench.assert_free()


def test_blocks_for_the_drafts_of_a_drafter_that_mirrors_them(tiny_dir: Path, host: Bench) -> None:
    request = Request("a", list(range(40, 54)), 40, draft_len=7)
    expected = outputs_without_drafts(host, [request])
    for shares in (False, True):
        bench = Bench(tiny_dir, shares_blocks=shares)
        assert bench.local is not None
        drafter = LocalDrafter(bench.local, known_of([request], expected), lambda row, position, drafts: drafts[:1])
        again = Request("a", request.prompt, 40, draft_len=7)
        planner = Planner(bench, 2)
        planner.place(again)
        short = 0
        while not again.done:
            if planner.can_plan(again) and len(planner.under_way) < 2:
                step = planner.launch([again])
                entry = drafter.look(step)
                _, ring = bench.local.drafter.ring(step.seq)
                last = min(entry["seq_lens"][0] + 7 - 1, 511)
                short += int(ring.block_tables[0, last // 16] == 0)
                drafter.answer(step, entry)
            else:
                planner.take()
        assert again.generated == expected["a"]
        assert (short == 0) == shares


# What goes wrong.


@pytest.mark.parametrize(
    "where",
    [
        "engine.decoder.Decoder.forward",
        "target_service.device.plan_buffer.PlanBuffer.upload",  # what it was to bring never came
        "target_service.device.packing.Packer.pack",
    ],
)
def test_a_bug_in_a_launch_takes_its_own_requests_only(
    tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    hit, other = Request("hit", list(range(30, 62)), 9), Request("other", [8, 9, 10], 9)
    expected = outputs_without_drafts(host, [hit, other])
    bench = Bench(tiny_dir, prefix_caching=False)
    planner = Planner(bench, 3, chunk=64)
    planner.place(hit)
    planner.place(other)
    planner.launch([other])
    planner.launch([hit, other])

    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr(where, broken)
        planner.seq += 1
        row = RowRequest("hit", 1, hit.planned_len, 1, 0, 0, True)
        fault = bench.send(StepRequest(planner.seq, "", 0, (row,), 0, 100, ahead=2))
    assert isinstance(fault, FaultReply)
    assert (fault.seq, fault.detail) == (3, "RuntimeError: no such luck")
    assert len(bench.engine.sessions) == 1
    hit.epoch += 1
    planner.place(hit)  # onto the same seat, very likely the same blocks: the device must be told of them again
    planner.drain()
    planner.run([hit, other])
    assert hit.generated == expected["hit"]
    assert other.generated == expected["other"]
    bench.release("hit", 2)
    bench.release("other")
    bench.assert_free()


def test_a_bug_in_a_completion_takes_its_own_requests_only(
    tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit, other = Request("hit", [30, 31], 9), Request("other", [8, 9, 10], 9)
    expected = outputs_without_drafts(host, [other])
    bench = Bench(tiny_dir)
    planner = Planner(bench, 3)
    planner.place(hit)
    planner.place(other)
    planner.launch([hit])
    planner.launch([other])
    runner = bench.engine.device_runner
    assert runner is not None
    complete = runner.complete

    def broken(flight: Flight) -> StepReply:
        if flight.step.seq == 1:
            raise ValueError("wrong")
        return complete(flight)

    monkeypatch.setattr(runner, "complete", broken)
    flight = planner.under_way.popleft()[2]
    assert isinstance(flight, Flight)
    with torch.inference_mode():
        bench.core.land(flight)
    assert isinstance(flight.reply, FaultReply)
    assert len(bench.engine.sessions) == 1
    for _ in range(9):  # what the step had for itself came back too
        planner.run([other])
    assert other.generated == expected["other"]
    bench.release("other")
    bench.assert_free()
