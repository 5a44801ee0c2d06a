"""Ranks with device execution against one rank with it, and against host execution: the same commands give the same
verdicts, the same ring entries, and the same tokens, however far the host lags behind the device.

One target of several ranks (a process has one group at a time) and one of a single rank run all scenarios, so that
seats and blocks have the same history on both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from target_service.device.buffers import StepShape
from target_service.device.forward import StepOutput
from target_service.messages import RankLoad, RowStatus, SamplingSettings, StepReply
from target_service.pcp.laps import Lap
from tests.target_service.device.bench import Bench, Planner, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter
from tests.target_service.device.test_equality import SETTINGS, known_of, make_requests
from tests.target_service.device.test_no_sync import no_reads
from tests.target_service.pcp.ranks import CpuGraphs

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Bench:
    return Bench(tiny_dir, "host", num_blocks=128)


@dataclass
class Benches:
    """The same target over one rank, and over `size`."""

    one: Bench
    many: Bench
    size: int


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size}-ranks")
def benches(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[Benches]:
    one, many = (
        Bench(tiny_dir, pcp_size=size, threads=1, block_size=4, num_blocks=64, num_seats=8)
        for size in (1, request.param)
    )
    ranks = many.engine.ranks
    assert ranks is not None
    try:
        yield Benches(one, many, request.param)
    finally:
        ranks.close()


class Recorder(Planner):
    """A planner that goes on where the stream stands, and keeps what it is told."""

    def __init__(self, bench: Bench, depth: int, chunk: int) -> None:
        super().__init__(bench, depth, chunk, overplan=depth > 1)
        self.seq = bench.stream.last_seq
        self.replies: list[StepReply] = []

    def take(self) -> StepReply:
        self.replies.append(super().take())
        return self.replies[-1]


@dataclass
class Found:
    """What a target of some size told in a scenario."""

    requests: list[Request]
    replies: list[StepReply]
    entries: list[dict[str, Any]]
    statuses: set[RowStatus] = field(default_factory=set)
    missed: int = 0


def compare(one: Found, many: Found, size: int) -> None:
    assert len(many.replies) == len(one.replies)
    for expected, reply in zip(one.replies, many.replies, strict=True):
        assert reply.drafts_missed == expected.drafts_missed
        assert reply.capacity == expected.capacity
        for row, other in zip(expected.rows, reply.rows, strict=True):
            for name in ("status", "token_ids", "num_accepted", "num_drafted", "context_len"):
                assert getattr(other, name) == getattr(row, name), (reply.seq, name)
            for logprob, other_logprob in zip(row.logprobs, other.logprobs, strict=True):
                assert other_logprob.top_ids == logprob.top_ids
                assert other_logprob.logprob == pytest.approx(logprob.logprob, abs=1e-4)
        assert expected.rank_loads == ()
        check_loads(reply, size)
    assert any(reply.times.collective_ms > 0 for reply in many.replies)  # all but uniform steps have times
    for entry, other_entry in zip(one.entries, many.entries, strict=True):
        hidden, other_hidden = entry.pop("hidden"), other_entry.pop("hidden")
        assert other_entry == entry
        torch.testing.assert_close(other_hidden, hidden, rtol=2e-5, atol=2e-5)


def check_loads(reply: StepReply, size: int) -> None:
    if not reply.rank_loads:  # no row was launched
        assert all(row.status is not RowStatus.OK for row in reply.rows)
        return
    assert len(reply.rank_loads) == size
    ran = sum(row.status is RowStatus.OK for row in reply.rows)
    assert sum(load.num_tokens for load in reply.rank_loads) >= ran
    assert isinstance(reply.rank_loads[0], RankLoad)
    assert 0 <= reply.times.collective_ms <= reply.times.total_ms


def wrong_here_and_there(row: int, position: int, drafts: list[int]) -> list[int]:
    """Some drafts are wrong, some absent."""
    if position % 7 == 3:
        return drafts[:1]
    return [(draft + 1) % 512 if (position + index) % 5 == 0 else draft for index, draft in enumerate(drafts)]


def run_crowd(bench: Bench, expected: dict[str, list[int]], num_rows: int, depth: int, chunk: int) -> Found:
    """num_rows requests of all sorts at a time; every fifth reply does not come."""
    return run_requests(bench, make_requests(num_rows, seed=num_rows * 10 + chunk), expected, depth, chunk)


def run_requests(
    bench: Bench, requests: list[Request], expected: dict[str, list[int]], depth: int, chunk: int
) -> Found:
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected), wrong_here_and_there)
    planner = Recorder(bench, depth, chunk)
    for request in requests:
        planner.place(request)
    while any(not request.done for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if active and len(planner.under_way) < depth:
            step = planner.launch(active)
            entry = drafter.look(step)
            if (step.seq - bench.stream.last_seq + len(drafter.seen)) % 5:
                drafter.answer(step, entry)
        else:
            planner.take()
    planner.drain()
    for request in requests:
        assert request.generated == expected[request.request_id], request
        bench.release(request.request_id, request.epoch)
    bench.assert_free()
    return Found(requests, planner.replies, drafter.seen, set(planner.statuses), planner.missed)


@pytest.mark.parametrize("depth", [1, 3])
def test_ranks_tell_what_one_rank_tells(benches: Benches, host: Bench, depth: int) -> None:
    accepted = missed = 0
    statuses: set[RowStatus] = set()
    for num_rows, chunk in ((1, 7), (3, 11), (5, 5)):
        expected = outputs_without_drafts(host, make_requests(num_rows, seed=num_rows * 10 + chunk))
        one, many = (run_crowd(bench, expected, num_rows, depth, chunk) for bench in (benches.one, benches.many))
        compare(one, many, benches.size)
        accepted += sum(request.num_accepted for request in many.requests)
        missed += many.missed
        statuses |= many.statuses
    assert accepted > 10
    assert missed > 0
    assert (RowStatus.SKIPPED in statuses) == (depth > 1)  # rows that the device decided not to run


@pytest.mark.parametrize("max_graphs", [100, 2])
def test_what_rank_0_replays_is_what_it_captured(
    benches: Benches, host: Bench, monkeypatch: pytest.MonkeyPatch, max_graphs: int
) -> None:
    """Rank 0 takes uniform steps from graphs, of which few are kept, and the others run each as it comes."""
    runner = benches.many.engine.device_runner
    assert runner is not None
    graphs = CpuGraphs(max_graphs)
    monkeypatch.setattr(runner.forward, "graphs", graphs)
    widths = (8, 11, 64)  # blocks of 4 tokens
    monkeypatch.setattr(runner.forward, "_column_sizes", widths)
    for num_rows, draft_len, plain in ((5, 3, True), (2, 0, False), (7, 3, False), (1, 0, True)):
        crowd = [make_requests(num_rows, seed=num_rows, draft_len=draft_len, plain=plain) for _ in range(3)]
        for requests in crowd:
            for index, request in enumerate(requests):  # they end one by one
                request.max_tokens = 9 + 3 * index
                if plain:
                    request.sampling = SamplingSettings()
        expected = outputs_without_drafts(host, crowd[2])
        one, many = (
            run_requests(bench, requests, expected, 2, 200)
            for bench, requests in zip((benches.one, benches.many), crowd, strict=False)
        )
        compare(one, many, benches.size)
    sizes = {(rows, query_len, greedy) for rows, query_len, _, _, greedy in graphs.seen}
    # Verdicts in the graph, and behind it; rows that fill a size, and rows that do not.
    assert sizes >= {(8, 4, True), (3, 4, True), (1, 4, True), (8, 4, False), (3, 1, False), (1, 1, True)}
    assert {columns for _, _, columns, _, _ in graphs.seen} == set(widths)
    assert graphs.counts.replays > 20
    assert graphs.counts.captures > min(max_graphs, 6)


def test_ranks_whose_group_cannot_be_captured(benches: Benches, host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is padded then."""
    runner = benches.many.engine.device_runner
    assert runner is not None
    monkeypatch.setattr(runner.forward.padding, "rows", ())
    expected = outputs_without_drafts(host, make_requests(3, seed=3 * 10 + 11))
    one, many = (run_crowd(bench, expected, 3, 2, 11) for bench in (benches.one, benches.many))
    compare(one, many, benches.size)
    assert all(reply.times.collective_ms > 0 for reply in many.replies if reply.rank_loads)


def run_lives(bench: Bench, expected: dict[str, list[int]], seed: int) -> Found:
    """Requests join, are preempted with steps under way and come again with what they have generated; prompts share
    their beginnings; blocks are few.
    """
    chance = random.Random(seed)
    requests = lives(seed)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Recorder(bench, 3, chance.choice([5, 13]))
    waiting, placed = list(requests), list[Request]()
    cached = again = 0
    while waiting or placed:
        if waiting and len(placed) < 7 and chance.random() < 0.5:
            request = waiting.pop(0)
            planner.place(request)
            cached += request.context_len
            again += bool(request.generated)
            placed.append(request)
        for request in [request for request in placed if request.done]:
            bench.release(request.request_id, request.epoch)
            placed.remove(request)
        starved = False
        active = [request for request in placed if planner.can_plan(request)]
        if active and len(planner.under_way) < planner.depth:
            step = planner.launch(active)
            drafter.answer(step, drafter.look(step))
        elif planner.under_way:
            before = len(planner.statuses)
            planner.take()
            starved = RowStatus.STARVED in planner.statuses[before:]
        running = [request for request in placed if not request.done]
        if running and (chance.random() < 0.15 or (starved and len(placed) > 1)):
            request = chance.choice(running)
            placed.remove(request)
            bench.release(request.request_id, request.epoch)
            request.epoch += 1
            waiting.append(request)
    planner.drain()
    for request in requests:
        assert request.generated == expected[request.request_id], request
    bench.assert_free()
    assert cached > 0
    assert again > 1
    return Found(requests, planner.replies, drafter.seen, set(planner.statuses), planner.missed)


def lives(seed: int) -> list[Request]:
    requests = make_requests(9, seed=seed)
    for index, request in enumerate(requests):
        request.prompt = list(range(100, 137)) + request.prompt if index % 2 else request.prompt
        request.max_tokens += 10
    return requests


@pytest.mark.parametrize("seed", [30, 40])
def test_lives_with_hits_preemption_and_starvation(benches: Benches, host: Bench, seed: int) -> None:
    expected = outputs_without_drafts(host, lives(seed))
    one, many = (run_lives(bench, expected, seed) for bench in (benches.one, benches.many))
    compare(one, many, benches.size)
    assert RowStatus.STARVED in many.statuses


def test_warming_up_over_ranks_changes_nothing(benches: Benches, host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches.many
    runner = bench.engine.device_runner
    assert runner is not None
    assert bench.local is not None
    requests = make_requests(3, seed=8, draft_len=3)
    expected = outputs_without_drafts(host, requests)
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Recorder(bench, 2, 9)
    for request in requests:
        planner.place(request)
    warmed, captured = list[StepShape](), list[StepShape]()
    laps, dropped = list[Lap](), list[Lap]()
    drop = Lap.drop
    ragged, uniform = runner.forward.ragged, runner.forward.capture

    def seen(shape: StepShape, *rest: Any) -> StepOutput:
        warmed.append(shape)
        output = ragged(shape, *rest)
        assert output.lap is not None
        laps.append(output.lap)
        return output

    def seen_drop(lap: Lap) -> None:
        dropped.append(lap)
        drop(lap)

    def seen_uniform(shape: StepShape, *rest: Any, **named: Any) -> None:
        captured.append(shape)
        uniform(shape, *rest, **named)

    while any(not request.done for request in requests):
        step = planner.launch([request for request in requests if planner.can_plan(request)])
        drafter.answer(step, drafter.look(step))
        planner.drain()
        with monkeypatch.context() as patched, torch.inference_mode():
            patched.setattr(runner.forward, "ragged", seen)
            patched.setattr(runner.forward, "capture", seen_uniform)
            patched.setattr(Lap, "drop", seen_drop)
            warmed.clear()
            captured.clear()
            for job in runner.warm_up_jobs(LAYERS, (1, 4), bench.channel):
                job()
    # Rows of one token and of four, then beside a prompt.
    assert [shape.num_tokens for shape in captured] == [1, 3, 8, 4, 12, 32]
    assert [shape.num_tokens for shape in warmed] == [36, 44, 64]
    assert laps == dropped  # their events are there for the next step
    for request in requests:
        assert request.generated == expected[request.request_id]
        bench.release(request.request_id)
    assert runner.forward.graphs.counts.captures == 0


def test_a_launch_over_ranks_reads_nothing(benches: Benches, host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches.many
    requests = [
        Request(f"n{index}", list(range(20 + index, 33 + index)), 5, SamplingSettings(**settings), draft_len=3)
        for index, settings in enumerate(SETTINGS[:5])
    ]
    expected = outputs_without_drafts(host, requests)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Recorder(bench, 3, 6)
    for request in requests:
        planner.place(request)
    while any(not request.done for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if active and len(planner.under_way) < planner.depth:
            with no_reads(monkeypatch) as found:
                step = planner.launch(active)
            assert not found
            drafter.answer(step, drafter.look(step))
        else:
            planner.take()
    planner.drain()
    for request in requests:
        bench.release(request.request_id)
