"""Do clients see nothing at all of it when the drafter is slow, hangs, dies or comes back?"""

from __future__ import annotations

import asyncio

import pytest

from gateway import drafter_link
from tests.gateway.conftest import MakeStack
from tests.gateway.readers import check, start
from tests.gateway.stack_of_fakes import eventually, generation, tokens_of
from tests.gateway.toy import continuation


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
