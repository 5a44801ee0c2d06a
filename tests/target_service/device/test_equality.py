"""Device execution gives the tokens that host execution gives, however far the host lags behind the device."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from target_service.messages import RowStatus, SamplingSettings
from tests.target_service.device.bench import Bench, Planner, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5, "seeded": True},
    {"temperature": 2.0, "top_k": 20, "seed": 6, "seeded": True},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.02, "seed": -7, "seeded": True},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"logit_bias": ((30, 6.0), (31, 6.0), (40, -8.0), (41, float("-inf")))},
    {
        "temperature": 1.3,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((11, 3.0), (12, -5.0)),
        "seed": 9,
        "seeded": True,
    },
]


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Bench:
    return Bench(tiny_dir, "host", num_blocks=128)


def make_requests(count: int, seed: int = 0, draft_len: int | None = None, plain: bool = False) -> list[Request]:
    """Requests of every kind, with prompts of every length."""
    chance = random.Random(seed)
    requests = []
    for index in range(count):
        settings = SamplingSettings() if plain else SamplingSettings(**SETTINGS[index % len(SETTINGS)])
        prompt = [chance.randrange(3, 512) for _ in range(chance.randint(1, 30))]
        requests.append(
            Request(
                f"r{index}-{seed}",
                prompt,
                chance.randint(1, 14),
                replace(settings, num_logprobs=chance.choice([-1, -1, 0, 3])),
                draft_len=chance.randint(0, 7) if draft_len is None else draft_len,
            )
        )
    return requests


def known_of(requests: list[Request], outputs: dict[str, list[int]]) -> dict[str, list[int]]:
    # Past the end there is something too, as there is for a drafter that does not know of the end.
    return {request.request_id: request.prompt + outputs[request.request_id] + [5] * 12 for request in requests}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("draft_len", range(8))
def test_every_draft_len_and_depth(tiny_dir: Path, host: Bench, draft_len: int, depth: int) -> None:
    requests = make_requests(7, seed=draft_len, draft_len=draft_len)
    expected = outputs_without_drafts(host, requests)
    bench = Bench(tiny_dir)
    assert bench.local is not None
    known = known_of(requests, expected)

    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        return [(draft + 1) % 512 if (position + index) % 5 == 0 else draft for index, draft in enumerate(drafts)]

    drafter = LocalDrafter(bench.local, known, script)
    planner = Planner(bench, depth, overplan=depth > 1)
    for request in requests:
        planner.place(request)
    planner.run(requests, drafter)
    for request in requests:
        assert request.generated == expected[request.request_id], request
    if draft_len:
        assert sum(request.num_accepted for request in requests) > 10
    if depth > 1:
        assert set(planner.statuses) == {RowStatus.OK, RowStatus.SKIPPED}
    else:
        assert set(planner.statuses) == {RowStatus.OK}
    for entry, limits in [(entry, None) for entry in drafter.seen]:
        assert limits is None
        assert max(entry["positions"], default=0) < 30 + 14
    for request in requests:
        bench.release(request.request_id)
    bench.assert_free()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8, 9, 33])
def test_every_number_of_rows(tiny_dir: Path, host: Bench, num_rows: int) -> None:
    requests = make_requests(num_rows, seed=num_rows + 50, plain=num_rows % 2 == 0)
    expected = outputs_without_drafts(host, requests)
    bench = Bench(tiny_dir, num_blocks=128)
    assert bench.local is not None
    planner = Planner(bench, 3, chunk=11)
    for request in requests:
        planner.place(request)
    planner.run(requests, LocalDrafter(bench.local, known_of(requests, expected)))
    for request in requests:
        assert request.generated == expected[request.request_id]
        bench.release(request.request_id)
    bench.assert_free()


def test_logprobs(tiny_dir: Path, host: Bench) -> None:
    requests = make_requests(7, seed=77, draft_len=3)
    for request in requests:
        request.sampling = replace(request.sampling, num_logprobs=2)
    again = [Request(r.request_id, r.prompt, r.max_tokens, r.sampling) for r in requests]
    planner = Planner(host, 1)
    host.stream.last_seq = 0
    for request in again:
        planner.place(request)
    planner.run(again)
    for request in again:
        host.release(request.request_id)
    bench = Bench(tiny_dir)
    assert bench.local is not None
    planner = Planner(bench, 2)
    for request in requests:
        planner.place(request)
    planner.run(requests, LocalDrafter(bench.local, {r.request_id: r.tokens + [5] * 12 for r in again}))
    for request, expected in zip(requests, again, strict=True):
        assert request.generated == expected.generated
        assert len(request.logprobs) == len(request.generated)
        for got, wanted in zip(request.logprobs, expected.logprobs, strict=True):
            assert got.top_ids == wanted.top_ids
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert got.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-4)


def test_prefix_hits_and_registration(tiny_dir: Path, host: Bench) -> None:
    """A block is offered only once the step that wrote it has come back; then it is hit."""
    base = make_requests(1, seed=3, plain=True)[0]
    prompt = list(range(100, 150))
    first = Request("first", prompt, 8)
    expected = outputs_without_drafts(host, [first])["first"]
    bench = Bench(tiny_dir)
    planner = Planner(bench, 4, chunk=64)
    planner.place(first)
    planner.launch([first])
    early = Request("early", [*prompt, 7], 4)
    assert bench.admit(early.admission()) == 0, "its KV is on its way, nobody knows yet that it arrived"
    bench.release("early")
    planner.take()
    late = Request("late", prompt, 8)
    assert bench.admit(late.admission()) == 48
    late.context_len, late.placed_len = 48, 50
    planner.run([first, late])
    assert first.generated == late.generated == expected
    # A whole new start from the middle of the hit, as where the drafter's is shorter.
    third = Request("third", prompt, 8)
    assert bench.admit(third.admission()) == 48
    third.context_len, third.placed_len = 21, 50
    planner.run([third])
    assert third.generated == expected
    for name in ("first", "late", "third"):
        bench.release(name)
    bench.assert_free()
    assert base.prompt


@pytest.mark.parametrize("seed", range(6))
def test_replies_of_every_kind(tiny_dir: Path, host: Bench, seed: int) -> None:
    """Right, absent, late, of another step, of another epoch, garbage: the tokens are the same."""
    chance = random.Random(seed)
    requests = make_requests(5, seed=seed + 900, draft_len=4)
    expected = outputs_without_drafts(host, requests)

    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        kind = chance.randrange(4)
        if kind == 0:
            return drafts[: chance.randint(0, 4)]
        if kind == 1:
            return [chance.choice([-1, -5, 512, 1 << 40, -(1 << 60), 77]) for _ in range(7)]
        return [*drafts, 3, 3, 3]  # more than was asked for

    bench = Bench(tiny_dir)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected), script)
    planner = Planner(bench, chance.choice([1, 2, 4]))
    for request in requests:
        planner.place(request)
    late: tuple[Any, Any] | None = None
    while any(not request.done for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if not active or len(planner.under_way) == planner.depth:
            planner.take()
            continue
        step = planner.launch(active)
        if late is not None:
            drafter.answer(*late)
            late = None
        entry = drafter.look(step)
        kind = chance.randrange(5)
        if kind == 0:
            late = (step, entry)
        elif kind == 1:
            drafter.answer(step, entry, tag=(step.seq - 4, 3, len(step.rows)))
        elif kind == 2:
            drafter.answer(step, entry, tag=(step.seq, 2, len(step.rows)))
        elif kind != 3:
            drafter.answer(step, entry)
    planner.drain()
    for request in requests:
        assert request.generated == expected[request.request_id]
        bench.release(request.request_id)
    bench.assert_free()
    assert planner.missed > 0
