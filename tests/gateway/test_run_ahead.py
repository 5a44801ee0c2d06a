"""Is run-ahead the same as lockstep to clients, and are late stops, cancels, starvation and losses reconciled?

Plans leave before the verdicts of those before them. What is asked of lockstep elsewhere is asked again here, two and
four steps deep; then what only run-ahead has.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gateway.generation import Generation, SamplingOptions
from gateway.requests import ActiveRequest
from gateway.target_loop import TargetLoop
from protos import target_pb2
from tests.gateway import test_drafter_faults, test_limits, test_serving, test_target_faults
from tests.gateway.conftest import MakeStack
from tests.gateway.fake_target import Resident
from tests.gateway.readers import check, start
from tests.gateway.stack_of_fakes import GREEDY, Stack, eventually, generation, read, tokens_of
from tests.gateway.toy import continuation

test_killed_target = test_target_faults.test_a_killed_target_is_waited_for_and_nothing_comes_twice
test_hanging_target = test_target_faults.test_a_target_that_hangs_is_taken_for_lost
test_failing_step = test_target_faults.test_a_failing_step_fails_its_request_and_no_other
test_killing_request = test_target_faults.test_a_request_that_kills_the_target_each_time_is_given_up
test_killed_drafter = test_drafter_faults.test_a_killed_drafter_is_not_noticed_and_a_new_one_is_used
test_channel_lost = test_drafter_faults.test_a_channel_that_carries_nothing_is_opened_anew
test_late_drafter = test_drafter_faults.test_a_drafter_that_is_late_once_keeps_its_requests
test_cold_request = test_drafter_faults.test_a_cold_request_is_followed_again
test_few_draft_seats = test_drafter_faults.test_a_drafter_with_fewer_seats_drafts_for_those_it_has
test_starved = test_limits.test_starved_requests_give_way_and_lose_nothing
test_preempted_sampling = test_limits.test_preemption_with_drafts_in_flight_and_sampling
test_one_stream = test_serving.test_one_stream_is_the_targets_own_continuation
test_chunks = test_serving.test_long_prompts_come_in_chunks_beside_decoding
test_prefix_hits = test_serving.test_prefix_hits_start_at_the_shorter_of_both
test_seeded = test_serving.test_seeded_sampling_is_the_same_in_a_crowd
test_logprobs = test_serving.test_logprobs_go_with_their_tokens
test_end_token = test_serving.test_the_end_token_ends_it
test_leaving = test_serving.test_every_way_of_leaving_is_noticed


@pytest.fixture(params=[2, 4])
def depth(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def loop_of(stack: Stack) -> TargetLoop:
    return stack.dispatcher._loops[0]


def request_of(stack: Stack, wanted: Generation) -> ActiveRequest:
    return loop_of(stack).scheduler.placed[wanted.request_id]


@pytest.mark.parametrize("depth", [3])
async def test_five_hundred_mixed_requests_leave_nothing(make_stack: MakeStack) -> None:
    await test_serving.test_five_hundred_mixed_requests_with_cancels_leave_nothing(make_stack)


async def test_plans_leave_before_the_verdict(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack(target={"max_step_tokens": 4})
    stack.target.go.clear()
    wanted = generation(range(1, 11), 30, draft_len=4)
    task = asyncio.create_task(stack.run(wanted))
    await eventually(lambda: len(loop_of(stack)._flights) == depth)
    plans = [flight.plan.rows[0] for flight in loop_of(stack)._flights._flights]
    # Chunks of 4, 4 and 2 tokens, then the anchor: known without a verdict.
    expected = [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    assert [(row.context_len, row.query_len - row.verify_len, row.samples) for row in plans] == expected[:depth]
    stack.target.go.set()
    assert tokens_of(await task) == continuation(range(1, 11), 30)
    assert all(plan.ahead == depth - 1 for plan in stack.target.plans)
    assert stack.drafter.holes == 0


async def test_drafts_are_verified_in_the_step_after(make_stack: MakeStack) -> None:
    """As many as in lockstep: running ahead must not lose drafts."""
    stack = await make_stack()
    await stack.run(generation((5, 6), 60, draft_len=4))
    decodes = [plan.rows[0] for plan in stack.target.plans if plan.rows[0].context_len > 2]
    assert sum(row.verify_len == 4 for row in decodes) > len(decodes) // 2
    # What is asked for in one step is verified in the next, as far as it can still be kept.
    for before, after in zip(stack.target.plans, stack.target.plans[1:], strict=False):
        if after.rows[0].verify_len:
            assert after.drafts_from_seq == before.seq
            assert after.rows[0].verify_len <= before.rows[0].draft_len


def surplus_of(stack: Stack, wanted: Generation) -> int:
    """Tokens that the target made for a request."""
    return sum(
        len(r.token_ids) for result in stack.target.results for r in result.rows if r.request_id == wanted.request_id
    )


@pytest.mark.parametrize("kind", ["stop token", "stop string", "length"])
async def test_what_comes_after_a_late_stop_is_dropped(make_stack: MakeStack, kind: str) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.002
    tokens = continuation((3, 1), 40)
    place = 1 + next(i for i in range(12, 40) if tokens.index(tokens[i]) == i)
    options: dict[str, object] = {
        "stop token": {"max_tokens": 40, "stop_token_ids": frozenset({tokens[place - 1]})},
        "stop string": {"max_tokens": 40, "stop": (f"{tokens[place - 2]} {tokens[place - 1]} ",)},
        "length": {"max_tokens": place},
    }
    wanted = generation((3, 1), **options[kind])  # type: ignore[arg-type]
    deltas = await stack.run(wanted)
    expected = tokens[: place - 2] if kind == "stop string" else tokens[:place]
    text = "".join(delta.text for delta in deltas)
    assert tokens_of(deltas) == tokens[:place]
    assert text == "".join(f"{token} " for token in (expected[:-1] if kind == "stop token" else expected))
    assert deltas[-1].finish_reason == ("length" if kind == "length" else "stop")
    await stack.until_empty()
    await eventually(lambda: not loop_of(stack)._flights)
    assert stack.metric("outrider_generated_tokens_total") == place
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == place
    if kind == "length":  # the target itself never goes past it
        assert surplus_of(stack, wanted) == place
    else:
        assert surplus_of(stack, wanted) > place, "nothing was under way: the test shows nothing"


async def test_a_row_with_nothing_left_to_run_is_skipped(make_stack: MakeStack) -> None:
    stack = await make_stack()
    for number in range(1, 12):
        prompt = (number, 5)
        assert tokens_of(await stack.run(generation(prompt, 9, draft_len=4))) == continuation(prompt, 9)
    await eventually(lambda: not loop_of(stack)._flights)
    statuses = [row.status for result in stack.target.results for row in result.rows]
    assert target_pb2.ROW_STATUS_SKIPPED in statuses


async def test_no_more_rows_are_planned_than_tokens_are_left(make_stack: MakeStack) -> None:
    stack = await make_stack()
    for max_tokens in (1, 2, 3):
        num_plans = len(stack.target.plans)
        await stack.run(generation((1, 2), max_tokens, draft_len=0))
        await stack.until_empty()
        assert len(stack.target.plans) - num_plans == max_tokens


async def test_clients_leave_while_steps_are_under_way(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    stay = asyncio.create_task(stack.run(generation((9, 9), 60)))
    for number in range(5):
        stream = await stack.dispatcher.submit(generation((number + 1,), 100))
        await anext(stream)
        await eventually(lambda: len(loop_of(stack)._flights) == depth)
        num_results, request_id = len(stack.target.results), stream.request_id
        await stream.aclose()
        await eventually(partial(lambda name: name not in stack.target.resident, request_id))
        assert len(stack.target.results) <= num_results + depth
        del stream
    assert tokens_of(await stay) == continuation((9, 9), 60)
    assert stack.metric("outrider_requests_total", outcome="cancelled") == 5


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
async def test_preempted_between_plan_and_verdict(make_stack: MakeStack, num_drafts: int, seed: int | None) -> None:
    """With so many drafts in flight: it goes on with the same tokens, and no late verdict is applied."""
    stack = await make_stack(drafter={"max_draft_len": 7})
    sampling = GREEDY if seed is None else SamplingOptions(temperature=1.0, seed=seed)
    wanted = generation((5, 6), 60, draft_len=num_drafts, sampling=sampling)
    stream = await stack.dispatcher.submit(wanted)
    tokens = [*(await anext(stream)).token_ids]
    loop = loop_of(stack)

    def in_flight() -> bool:
        rows = [flight.plan.rows[0] for flight in loop._flights._flights]
        return len(rows) > 1 and all(row.verify_len == num_drafts and row.context_len > 2 for row in rows)

    stack.target.step_s = 0.005
    await eventually(in_flight)
    preempted = request_of(stack, wanted)
    known = list(preempted.token_ids)
    before = len(stack.target.results)
    loop._send_back(preempted)
    loop._advance()
    await eventually(lambda: len(stack.target.results) > before)
    assert preempted.epoch == 2
    assert preempted.token_ids == known, "a late verdict was applied"
    tokens += tokens_of(await read(stream))
    assert tokens == continuation((5, 6), 60, seed)
    assert stack.drafter.holes == 0


async def test_one_shortage_takes_one_place(make_stack: MakeStack, depth: int) -> None:
    """Steps under way when somebody gives way are starved too; nobody else goes for them."""
    stack = await make_stack(drafting=False, target={"num_blocks": 13, "num_seats": 3})
    # 17 blocks for all three at their longest; 12 for the older two.
    deltas = await asyncio.gather(*(stack.run(generation((number, 2, 3), 20)) for number in (1, 2, 3)))
    for number, one in zip((1, 2, 3), deltas, strict=True):
        assert tokens_of(one) == continuation((number, 2, 3), 20)
    assert stack.metric("outrider_preemptions_total") == 1


@pytest.mark.parametrize("depth", [1, 3])
async def test_rows_that_starved_are_run_again(make_stack: MakeStack, depth: int) -> None:
    """Chunks planned after one that starved are skipped, and planned anew from where the request stands."""
    stack = await make_stack(target={"num_blocks": 6, "block_size": 40, "max_step_tokens": 32})
    stack.target.step_s = 0.005
    long, prompt = tuple(range(1, 46)), tuple(range(1, 91))
    older = asyncio.create_task(stack.run(generation(long, 34, draft_len=0)))  # two blocks; its steps go on meanwhile
    await eventually(lambda: len(stack.target.results) > 2)
    wanted = generation(prompt, 20)
    task = asyncio.create_task(stack.run(wanted))
    await eventually(lambda: wanted.request_id in stack.target.resident)
    rest = stack.target.free_blocks - 1 + stack.target.resident[wanted.request_id].blocks  # but for its first chunk
    stack.target.resident["other gateway's"] = Resident(1, [1], 1, 99, None, -1, owner=0, blocks=rest)

    def statuses() -> list[int]:
        return [row.status for result in stack.target.results for row in result.rows]

    await eventually(lambda: target_pb2.ROW_STATUS_STARVED in statuses())
    if depth > 1:
        await eventually(lambda: target_pb2.ROW_STATUS_SKIPPED in statuses())
    del stack.target.resident["other gateway's"]
    num_skipped = statuses().count(target_pb2.ROW_STATUS_SKIPPED)
    assert tokens_of(await task) == continuation(prompt, 20)
    assert tokens_of(await older) == continuation(long, 34)
    assert statuses().count(target_pb2.ROW_STATUS_SKIPPED) <= num_skipped + depth + 1  # a last one at the length limit
    assert stack.drafter.holes == 0


@pytest.mark.parametrize("depth", [1])
async def test_nothing_is_verified_after_a_row_that_starved(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack(target={"num_blocks": 20})
    stack.target.resident["other gateway's"] = Resident(1, [1], 1, 99, None, -1, owner=0, blocks=15)
    task = asyncio.create_task(stack.run(generation((5, 6), 40)))
    await eventually(
        lambda: any(result.rows[0].status == target_pb2.ROW_STATUS_STARVED for result in stack.target.results)
    )
    del stack.target.resident["other gateway's"]
    await task
    starved = 0
    for result, plan in zip(stack.target.results, stack.target.plans[1:], strict=False):
        if result.rows[0].status == target_pb2.ROW_STATUS_STARVED:
            starved += 1
            assert plan.rows[0].verify_len == 0
    assert starved > 0


async def test_a_suspect_runs_in_lockstep(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    tasks = await start(stack, 2, 60)
    loop = loop_of(stack)
    await eventually(lambda: len(loop._flights) == depth)
    stack.target.step_s = 0.1
    suspect = next(iter(loop.scheduler.placed.values()))
    suspect.faults = 1  # as after a step that failed
    loop._send_back(suspect)

    def is_alone() -> bool:
        rows = [row for flight in loop._flights._flights for row in flight.rows]
        return [row.request for row in rows] == [suspect] and (suspect.epoch, suspect.faults) == (2, 1)

    await eventually(is_alone)
    await asyncio.sleep(0.02)  # whatever would be sent beside it would have been by now
    assert is_alone()
    stack.target.step_s = 0.005
    await check(tasks, 60)
    assert max(len(plan.rows) for plan in stack.target.plans) == 2


async def test_a_request_the_target_has_lost_is_placed_anew_once(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack(drafting=False)
    stack.target.step_s = 0.005
    wanted = generation((5, 6), 60)
    task = asyncio.create_task(stack.run(wanted))
    await eventually(lambda: len(stack.target.results) > 4 and len(loop_of(stack)._flights) == depth)
    del stack.target.resident[wanted.request_id]
    assert tokens_of(await task) == continuation((5, 6), 60)
    unknown = [
        row.epoch
        for result in stack.target.results
        for row in result.rows
        if row.status == target_pb2.ROW_STATUS_UNKNOWN
    ]
    assert len(unknown) >= depth - 1
    assert set(unknown) == {1}, "late UNKNOWN rows are of the placement that was given up"


async def test_a_drafter_that_hangs_costs_no_more_than_the_steps_under_way(make_stack: MakeStack, depth: int) -> None:
    stack = await make_stack(step_deadline_ms=100)
    stack.target.step_s = 0.002
    tasks = await start(stack, 2, 120)
    stack.drafter.go.clear()
    await check(tasks, 120)
    assert 1 <= sum(result.drafts_missed for result in stack.target.results) <= depth
    link = loop_of(stack).bonds.link
    assert link is not None
    assert link._misses == 1, "one hang is one miss"
    stack.drafter.go.set()
    await eventually(lambda: stack.service("drafter") == "serving")
    num_drafted = stack.drafter.num_drafted
    await stack.run(generation(max_tokens=30))
    assert stack.drafter.num_drafted > num_drafted, "drafting resumed"
