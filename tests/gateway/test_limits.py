"""What do clients see when there is more than fits, and when the gateway stops? And which status has each error?"""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.error_map import describe
from gateway.errors import (
    ConfigError,
    GatewayError,
    GenerationTimeout,
    InvalidGeneration,
    QueueFull,
    ShuttingDown,
    StepFailed,
    TargetUnavailable,
)
from gateway.generation import SamplingOptions
from gateway.turned_away import TurnedAway
from tests.gateway.conftest import MakeStack
from tests.gateway.stack_of_fakes import eventually, generation, read, tokens_of
from tests.gateway.toy import continuation

# More than fits.


async def test_a_full_queue_is_refused_with_a_time_to_come_back(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 1}, max_waiting=2)
    stack.target.go.clear()
    streams = [await stack.dispatcher.submit(generation((number,), 5)) for number in (1, 2, 3)]
    told = []
    for _ in range(4):
        with pytest.raises(QueueFull) as caught:
            await stack.dispatcher.submit(generation())
        told.append(round(caught.value.retry_after_s))
    assert told == [1, 2, 3, 3]  # a place each, as far as the queue is long
    assert stack.dispatcher.status().waiting == 2
    stack.target.go.set()
    for number, stream in zip((1, 2, 3), streams, strict=True):
        assert tokens_of(await read(stream)) == continuation((number,), 5)
    assert tokens_of(await stack.run(generation())) == continuation((1, 2, 3), 20)


async def test_the_time_to_come_back_is_that_of_running_not_of_waiting(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four one after another, all there from the beginning."""
    ran: list[float] = []
    monkeypatch.setattr(TurnedAway, "ended", lambda _, run_s: ran.append(run_s))
    stack = await make_stack(drafting=False, target={"num_seats": 1}, max_waiting=3)
    stack.target.step_s = 0.01
    began = time.monotonic()
    await asyncio.gather(*(stack.run(generation((number,), 10)) for number in (1, 2, 3, 4)))
    assert len(ran) == 4
    assert sum(ran) <= time.monotonic() - began


async def test_waiting_too_long_is_a_timeout(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 1}, queue_timeout_s=0.2)
    stack.target.step_s = 0.02
    first = asyncio.create_task(stack.run(generation((1,), 60, draft_len=0)))
    await asyncio.sleep(0)
    with pytest.raises(GenerationTimeout):
        await stack.run(generation())
    assert tokens_of(await first) == continuation((1,), 60)


async def test_starved_requests_give_way_and_lose_nothing(make_stack: MakeStack) -> None:
    """Four requests of up to 63 tokens, blocks for 80: preemption must happen, and the oldest never gives way."""
    stack = await make_stack(target={"num_blocks": 20, "num_seats": 4})
    deltas = await asyncio.gather(*(stack.run(generation((number, 2, 3), 60)) for number in (1, 2, 3, 4)))
    for number, one in zip((1, 2, 3, 4), deltas, strict=True):
        assert tokens_of(one) == continuation((number, 2, 3), 60)
    assert stack.metric("outrider_preemptions_total") > 0
    assert stack.drafter.holes == 0
    # Giving way must not go round in circles: each of the younger three loses its place a few times at most.
    assert stack.metric("outrider_preemptions_total") <= 12
    oldest = next(row.request_id for row in stack.target.plans[0].rows)
    assert {row.epoch for plan in stack.target.plans for row in plan.rows if row.request_id == oldest} == {1}


async def test_preemption_with_drafts_in_flight_and_sampling(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_blocks": 12, "num_seats": 3})
    wanted = [
        generation((number,), 40, sampling=SamplingOptions(temperature=1.0, seed=number), draft_len=draft_len)
        for number, draft_len in ((1, 0), (2, 1), (3, 3), (4, 4), (5, 4))
    ]
    for one, deltas in zip(wanted, await asyncio.gather(*map(stack.run, wanted)), strict=True):
        assert tokens_of(deltas) == continuation(one.token_ids, 40, one.sampling.seed)
    assert stack.metric("outrider_preemptions_total") > 0


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field"), [(48, None, "prompt"), (60, 1, "prompt"), (40, 9, "max_tokens")]
)
async def test_what_can_never_fit_is_refused_at_the_door(
    make_stack: MakeStack, prompt_len: int, max_tokens: int | None, field: str
) -> None:
    stack = await make_stack(target={"num_blocks": 12})  # 12 usable blocks of 4 tokens
    with pytest.raises(InvalidGeneration) as caught:
        await stack.dispatcher.submit(generation((1,) * prompt_len, max_tokens))
    assert caught.value.field == field
    deltas = await stack.run(generation((1,) * 40, None))
    assert len(tokens_of(deltas)) == 8
    assert deltas[-1].finish_reason == "length"


async def test_more_drafts_than_the_gateway_allows_are_refused_not_cut(make_stack: MakeStack) -> None:
    """A drafter that proposes fewer than it was asked for is another matter: that is how it is."""
    stack = await make_stack(max_draft_len=6, drafter={"max_draft_len": 2})
    with pytest.raises(InvalidGeneration) as caught:
        await stack.dispatcher.submit(generation((1, 2), 5, draft_len=7))
    assert (caught.value.field, caught.value.detail) == ("draft_len", "must be in 0..6, got 7")
    assert len(tokens_of(await stack.run(generation((1, 2), 5, draft_len=6)))) == 5
    await stack.until_empty()


# Stopping.


async def test_stopping_lets_the_short_end_and_cuts_off_the_long(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.01
    short = asyncio.create_task(stack.run(generation((1,), 8, draft_len=0)))
    long = asyncio.create_task(stack.run(generation((2,), 200, draft_len=0)))
    await eventually(lambda: len(stack.target.results) > 1)
    stopping = asyncio.create_task(stack.dispatcher.stop(0.4))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await stack.dispatcher.submit(generation())
    await stopping
    assert tokens_of(await short) == continuation((1,), 8)
    with pytest.raises(ShuttingDown):
        await long


def test_every_error_of_the_tree_has_a_status() -> None:
    def leaves(kind: type[GatewayError]) -> list[type[GatewayError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]

    examples = [
        GatewayError("words"),
        ConfigError("key", "words"),
        InvalidGeneration("top_p", "words"),
        QueueFull(2.5),
        GenerationTimeout("words"),
        TargetUnavailable("words"),
        ShuttingDown("words"),
        StepFailed("words"),
    ]
    assert {type(example) for example in examples} == set(leaves(GatewayError))
    for example in examples:
        problem = describe(example)
        assert problem.http_status >= 400
        assert problem.message
    assert describe(QueueFull(2.5)).headers() == {"Retry-After": "3"}
    assert describe(InvalidGeneration("top_p", "no")).body()["error"]["param"] == "top_p"
    assert "secret" not in describe(RuntimeError("secret")).message
