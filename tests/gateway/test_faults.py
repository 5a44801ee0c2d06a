"""What do clients see when a service is slow, hangs, dies or comes back?"""

from __future__ import annotations

import asyncio

import pytest

from gateway import drafter_link
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
from tests.gateway.conftest import MakeStack
from tests.gateway.stack_of_fakes import Stack, eventually, generation, read, tokens_of
from tests.gateway.toy import continuation


async def start(stack: Stack, num_clients: int, max_tokens: int, num_before: int = 2) -> list[asyncio.Task[list[int]]]:
    """Clients that read to the end, each with a prompt of its own; returns once each has had `num_before` deltas."""
    begun = [asyncio.Event() for _ in range(num_clients)]

    async def client(number: int) -> list[int]:
        stream = await stack.dispatcher.submit(generation((number + 1, 2, 3), max_tokens))
        tokens: list[int] = []
        num_deltas = 0
        async for delta in stream:
            tokens += delta.token_ids
            num_deltas += 1
            if num_deltas == num_before:
                begun[number].set()
        return tokens

    tasks = [asyncio.create_task(client(number)) for number in range(num_clients)]
    async with asyncio.timeout(10):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def check(tasks: list[asyncio.Task[list[int]]], max_tokens: int) -> None:
    """Every client got exactly its own continuation."""
    async with asyncio.timeout(30):
        for number, tokens in enumerate(await asyncio.gather(*tasks)):
            assert tokens == continuation((number + 1, 2, 3), max_tokens)


# The target.


@pytest.mark.parametrize("drafting", [False, True])
async def test_a_killed_target_is_waited_for_and_nothing_comes_twice(make_stack: MakeStack, drafting: bool) -> None:
    stack = await make_stack(drafting=drafting)
    stack.target.step_s = 0.01
    tasks = await start(stack, 4, 200)
    for _ in range(2):
        await stack.target.kill()
        await eventually(lambda: stack.service("target") == "lost")
        await stack.target.start()
        await stack.target.some_steps(3)
        if drafting:
            await eventually(lambda: any(row.verify_len for row in stack.target.plans[-1].rows))
    await check(tasks, 200)
    assert stack.metric("outrider_resumptions_total") >= 4
    assert stack.drafter.holes == 0


async def test_a_target_that_stays_away_is_503_for_running_waiting_and_new(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 1}, target_wait_s=0.3)
    stack.target.step_s = 0.005
    assert stack.metric("outrider_free_seats") == 1
    running = await stack.dispatcher.submit(generation(max_tokens=100))
    await anext(running)
    waiting = await stack.dispatcher.submit(generation(max_tokens=100))
    assert stack.metric("outrider_cache_use_ratio") > 0
    await stack.target.kill()
    for stream in (running, waiting):
        with pytest.raises(TargetUnavailable):
            await asyncio.wait_for(read(stream), 5)
    with pytest.raises(TargetUnavailable):
        await stack.dispatcher.submit(generation())
    assert stack.metric("outrider_free_seats") == stack.metric("outrider_cache_use_ratio") == 0
    await stack.target.start()
    await eventually(lambda: stack.service("target") == "serving")
    assert tokens_of(await stack.run(generation())) == continuation((1, 2, 3), 20)


async def test_requests_wait_for_a_target_that_is_not_up_yet(make_stack: MakeStack) -> None:
    stack = await make_stack(start_target=False)
    task = asyncio.create_task(stack.run(generation()))
    await asyncio.sleep(0.05)
    assert not task.done()
    assert stack.service("target") == "connecting"
    await stack.target.start()
    assert tokens_of(await asyncio.wait_for(task, 10)) == continuation((1, 2, 3), 20)
    await eventually(lambda: stack.service("drafter") == "serving")


async def test_a_target_that_never_comes_is_503(make_stack: MakeStack) -> None:
    stack = await make_stack(start_target=False, target_wait_s=0.2)
    with pytest.raises(TargetUnavailable):
        await asyncio.wait_for(stack.dispatcher.submit(generation()), 5)


async def test_a_target_that_hangs_is_taken_for_lost(make_stack: MakeStack) -> None:
    stack = await make_stack(step_timeout_s=0.3)
    stack.target.step_s = 0.005
    tasks = await start(stack, 2, 60)
    stack.target.go.clear()
    await eventually(lambda: stack.service("target") != "serving")
    stack.target.go.set()
    await check(tasks, 60)


async def test_a_failing_step_fails_its_request_and_no_other(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 8})
    stack.target.step_s = 0.005
    tasks = await start(stack, 3, 60)
    stack.target.poison = {96}  # no client's text has it within 60 tokens
    assert all(96 not in [number + 1, *continuation((number + 1, 2, 3), 60)] for number in range(3))
    with pytest.raises(StepFailed, match="poisoned"):
        await stack.run(generation((96,), 10))
    await check(tasks, 60)


async def test_after_a_failing_step_nobody_waits_for_the_drafter(make_stack: MakeStack) -> None:
    """It waits for that step itself, which never comes through the channel."""
    stack = await make_stack(step_deadline_ms=4000)
    stack.target.step_s = 0.005
    tasks = await start(stack, 2, 60)
    began = asyncio.get_running_loop().time()
    stack.target.poison = {96}
    with pytest.raises(StepFailed):
        await stack.run(generation((96,), 10))
    await check(tasks, 60)
    assert asyncio.get_running_loop().time() - began < 3.8
    await eventually(lambda: stack.service("drafter") == "serving")


async def test_a_request_that_kills_the_target_each_time_is_given_up(make_stack: MakeStack) -> None:
    stack = await make_stack()
    wanted = generation((50,), 100)
    stream = await stack.dispatcher.submit(wanted)
    for _ in range(3):
        stack.target.go.clear()
        await eventually(lambda: len(stack.target.resident) == 1)
        await asyncio.sleep(0.05)  # its step is under way
        await stack.target.kill()
        await eventually(lambda: stack.service("target") == "lost")
        await stack.target.start()
    stack.target.go.set()
    with pytest.raises(StepFailed):
        await asyncio.wait_for(read(stream), 5)


async def test_a_request_whose_verdicts_make_no_sense_is_given_up(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    tasks = await start(stack, 2, 60)
    stack.target.garbled = {96}
    with pytest.raises(StepFailed):
        await asyncio.wait_for(stack.run(generation((96,), 10)), 5)
    await check(tasks, 60)


async def test_seats_that_another_gateway_keeps_are_not_waited_for_for_ever(make_stack: MakeStack) -> None:
    stack = await make_stack(queue_timeout_s=0.3)
    stack.target.seats_of_others = stack.target.num_seats
    with pytest.raises(GenerationTimeout):
        await asyncio.wait_for(stack.run(generation()), 5)
    stack.target.seats_of_others = 0
    assert tokens_of(await stack.run(generation())) == continuation((1, 2, 3), 20)


# The drafter.


async def test_a_killed_drafter_is_not_noticed_and_a_new_one_is_used(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    tasks = await start(stack, 4, 200)
    await stack.drafter.kill()
    await eventually(lambda: stack.service("drafter") == "lost")
    await stack.target.some_steps(8)  # those under way name the old channel still
    assert not any(row.verify_len for row in stack.target.plans[-1].rows)
    stack.drafter.admitted.clear()
    await stack.drafter.start()
    await eventually(lambda: any(row.verify_len for row in stack.target.plans[-1].rows))
    assert stack.drafter.admitted
    assert all(admit.mid_stream for admit in stack.drafter.admitted)
    await check(tasks, 200)
    assert stack.drafter.holes == 0
    assert stack.metric("outrider_resumptions_total") == 0


async def test_without_a_drafter_everything_is_served(make_stack: MakeStack) -> None:
    stack = await make_stack()
    await stack.drafter.kill()
    await check(await start(stack, 3, 30), 30)


async def test_a_drafter_that_hangs_costs_one_deadline(make_stack: MakeStack) -> None:
    stack = await make_stack(step_deadline_ms=100)
    stack.target.step_s = 0.002
    tasks = await start(stack, 2, 120)
    stack.drafter.go.clear()
    began = asyncio.get_running_loop().time()
    await check(tasks, 120)
    assert asyncio.get_running_loop().time() - began < 2.0
    assert sum(result.drafts_missed for result in stack.target.results) == 1
    assert stack.metric("outrider_missed_drafts_total") == 1
    stack.drafter.go.set()
    await eventually(lambda: stack.service("drafter") == "serving")
    num_drafted = stack.drafter.num_drafted
    await stack.run(generation(max_tokens=30))
    assert stack.drafter.num_drafted > num_drafted, "drafting resumed"


async def test_a_drafter_that_is_late_once_keeps_its_requests(make_stack: MakeStack) -> None:
    """It is told of every step meanwhile, so it catches up without a hole and without being asked anew."""
    stack = await make_stack(step_deadline_ms=60)
    stack.target.step_s = 0.03
    task = asyncio.create_task(stack.run(generation((5, 6), 90)))
    await eventually(lambda: stack.drafter.num_drafted > 0)
    stack.drafter.go.clear()
    await eventually(lambda: stack.metric("outrider_missed_drafts_total") == 1)
    assert stack.service("drafter") == "lost"
    stack.drafter.go.set()
    await eventually(lambda: stack.service("drafter") == "serving")
    num_drafted = stack.drafter.num_drafted
    await eventually(lambda: stack.drafter.num_drafted > num_drafted)
    assert tokens_of(await task) == continuation((5, 6), 90)
    assert len(stack.drafter.admitted) == 1
    assert stack.drafter.holes == 0


async def test_a_channel_that_carries_nothing_is_opened_anew(make_stack: MakeStack) -> None:
    stack = await make_stack(step_deadline_ms=60)
    stack.target.step_s = 0.005
    task = asyncio.create_task(stack.run(generation((5, 6), 150)))
    await eventually(lambda: stack.drafter.num_drafted > 0)
    stack.target.reset_channels()
    epoch = stack.target.channel_epoch
    await eventually(lambda: stack.target.channel_epoch > epoch)
    num_drafted = stack.drafter.num_drafted
    await eventually(lambda: stack.drafter.num_drafted > num_drafted)
    assert tokens_of(await task) == continuation((5, 6), 150)


async def test_a_request_that_comes_while_the_drafter_hangs_starts_without_it(make_stack: MakeStack) -> None:
    stack = await make_stack(step_deadline_ms=100)
    stack.target.step_s = 0.005
    tasks = await start(stack, 1, 40)
    stack.drafter.go.clear()
    late = asyncio.create_task(stack.run(generation((50, 51), 10)))
    assert tokens_of(await asyncio.wait_for(late, 3)) == continuation((50, 51), 10)
    await check(tasks, 40)


async def test_a_drafter_that_answers_an_admission_late_is_asked_again(make_stack: MakeStack) -> None:
    stack = await make_stack(step_deadline_ms=200)
    stack.target.step_s = 0.02
    stack.drafter.admit_s = 0.5
    task = asyncio.create_task(stack.run(generation((5, 6), 200)))
    await eventually(lambda: len(stack.drafter.admitted) == 1)
    stack.drafter.admit_s = 0.0
    await eventually(lambda: stack.drafter.num_drafted > 0, 3)
    assert tokens_of(await task) == continuation((5, 6), 200)


async def test_a_drafter_that_does_not_answer_hello_is_connected_to_again(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_link, "HANG_S", 0.2)
    stack = await make_stack()
    stack.drafter.is_mute = True
    await stack.drafter.kill()
    await stack.drafter.start()
    await eventually(lambda: "no answer" in stack.dispatcher.status().services[1].detail)
    stack.drafter.is_mute = False
    await eventually(lambda: stack.service("drafter") == "serving")


async def test_a_channel_that_is_refused_is_asked_for_less_and_less_often(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.drafter.refusal = "vocab_size: another model"
    await stack.target.kill()
    await stack.target.start()
    await eventually(lambda: stack.service("target") == "serving")
    await asyncio.sleep(1.0)
    assert stack.drafter.num_opened <= 8
    assert "another model" in stack.dispatcher.status().services[1].detail
    stack.drafter.refusal = ""
    await stack.target.kill()
    await stack.target.start()
    await eventually(lambda: stack.service("drafter") == "serving")


async def test_a_slow_drafter_changes_no_token(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.drafter.delay_s = 0.01
    await check(await start(stack, 3, 60), 60)
    assert stack.metric("outrider_accepted_tokens_total") > 0


async def test_a_cold_request_is_followed_again(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.003
    wanted = generation((5, 6), 120)
    task = asyncio.create_task(stack.run(wanted))
    await eventually(lambda: len(stack.target.results) > 3)
    num_admitted = len(stack.drafter.admitted)
    stack.drafter.lose.add(wanted.request_id)
    await eventually(lambda: len(stack.drafter.admitted) > num_admitted)
    assert stack.drafter.admitted[-1].mid_stream
    assert stack.drafter.admitted[-1].epoch == 1
    num_steps = len(stack.target.plans)
    await eventually(lambda: any(row.verify_len for plan in stack.target.plans[num_steps:] for row in plan.rows))
    assert tokens_of(await task) == continuation((5, 6), 120)
    assert stack.drafter.holes == 0
    # Steps under way when it was asked anew report it cold once more; that is no news.
    assert len(stack.drafter.admitted) == num_admitted + 1


async def test_a_drafter_with_fewer_seats_drafts_for_those_it_has(make_stack: MakeStack) -> None:
    stack = await make_stack(drafter={"num_seats": 1})
    await check(await start(stack, 3, 60), 60)
    assert stack.metric("outrider_accepted_tokens_total") > 0


# More than fits.


async def test_a_full_queue_is_refused_with_a_time_to_come_back(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 1}, max_waiting=2)
    stack.target.go.clear()
    streams = [await stack.dispatcher.submit(generation((number,), 5)) for number in (1, 2, 3)]
    with pytest.raises(QueueFull) as caught:
        await stack.dispatcher.submit(generation())
    assert 1 <= caught.value.retry_after_s <= 60
    assert stack.dispatcher.status().waiting == 2
    stack.target.go.set()
    for number, stream in zip((1, 2, 3), streams, strict=True):
        assert tokens_of(await read(stream)) == continuation((number,), 5)
    assert tokens_of(await stack.run(generation())) == continuation((1, 2, 3), 20)


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


async def test_more_drafts_than_the_gateway_allows_are_refused_not_cut(make_stack: MakeStack) -> None:
    """A drafter that proposes fewer than it was asked for is another matter: that is how it is."""
    stack = await make_stack(max_draft_len=6, drafter={"max_draft_len": 2})
    with pytest.raises(InvalidGeneration) as caught:
        await stack.dispatcher.submit(generation((1, 2), 5, draft_len=7))
    assert (caught.value.field, caught.value.detail) == ("draft_len", "must be in 0..6, got 7")
    assert len(tokens_of(await stack.run(generation((1, 2), 5, draft_len=6)))) == 5
    await stack.until_empty()
