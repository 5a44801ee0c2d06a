"""What do clients see when the target is slow, hangs, fails, dies or comes back?"""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import GenerationTimeout, StepFailed, TargetUnavailable
from tests.gateway.conftest import MakeStack
from tests.gateway.readers import check, start
from tests.gateway.stack_of_fakes import eventually, generation, read, tokens_of
from tests.gateway.toy import continuation


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
