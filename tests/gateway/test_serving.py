"""Does every client get exactly the target's tokens, however many there are and whenever they leave?"""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.generation import SamplingOptions
from tests.gateway.conftest import MakeStack
from tests.gateway.stack_of_fakes import GREEDY, eventually, generation, read, tokens_of
from tests.gateway.toy import END, continuation


@pytest.mark.parametrize("draft_len", [0, 1, 4, 7])
async def test_one_stream_is_the_targets_own_continuation(make_stack: MakeStack, draft_len: int) -> None:
    stack = await make_stack()
    deltas = await stack.run(generation((4, 8, 15), 40, draft_len=draft_len))
    assert tokens_of(deltas) == continuation((4, 8, 15), 40)
    assert "".join(delta.text for delta in deltas) == "".join(f"{token} " for token in continuation((4, 8, 15), 40))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 40)
    if draft_len == 0:
        assert not stack.drafter.admitted, "a request without drafting is none of the drafter's business"
        assert len(deltas) == 40
    else:
        assert usage.accepted_tokens == sum(sum(delta.from_draft) for delta in deltas) > 0
        assert len(deltas) < 40
    assert stack.drafter.holes == 0


async def test_long_prompts_come_in_chunks_beside_decoding(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"max_step_tokens": 16, "num_blocks": 256})
    prompts = [tuple(range(1, 1 + length)) for length in (50, 3, 90, 17)]
    wanted = [generation(prompt, 30) for prompt in prompts]
    for deltas, prompt in zip(await asyncio.gather(*map(stack.run, wanted)), prompts, strict=True):
        assert tokens_of(deltas) == continuation(prompt, 30)
    assert any(len(plan.rows) > 1 and not all(row.samples for row in plan.rows) for plan in stack.target.plans)
    assert stack.drafter.holes == 0


async def test_prefix_hits_start_at_the_shorter_of_both(make_stack: MakeStack) -> None:
    stack = await make_stack()
    stack.target.cached_len, stack.drafter.cached_len = 8, 4
    prompt = tuple(range(1, 13))
    for draft_len, expected in ((4, 4), (0, 8)):
        deltas = await stack.run(generation(prompt, 6, draft_len=draft_len))
        assert tokens_of(deltas) == continuation(prompt, 6)
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.cached_tokens == expected


async def test_seeded_sampling_is_the_same_in_a_crowd(make_stack: MakeStack) -> None:
    stack = await make_stack()
    wanted = [
        generation((1, 2), 25, sampling=SamplingOptions(temperature=1.0, seed=seed), draft_len=draft_len)
        for seed in (1, -7, 2**63)
        for draft_len in (0, 3)
    ]
    for deltas, one in zip(await asyncio.gather(*map(stack.run, wanted)), wanted, strict=True):
        seed = one.sampling.seed
        assert seed is not None
        assert tokens_of(deltas) == continuation((1, 2), 25, seed % 2**64)


async def test_logprobs_go_with_their_tokens(make_stack: MakeStack) -> None:
    stack = await make_stack()
    deltas = await stack.run(generation((1, 2), 15, sampling=SamplingOptions(temperature=0.0, num_logprobs=1)))
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert [logprob.token_id for logprob in logprobs] == tokens_of(deltas)
    assert [logprob.logprob for logprob in logprobs] == [-float(token) for token in tokens_of(deltas)]
    assert logprobs[0].top == ((logprobs[0].token_id, logprobs[0].logprob),)


async def test_the_end_token_ends_it(make_stack: MakeStack) -> None:
    stack = await make_stack()
    prompt = next((a, b) for a in range(1, 97) for b in range(1, 97) if END in continuation((a, b), 30)[3:])
    expected = continuation(prompt, 30, ends=frozenset({END}))
    deltas = await stack.run(generation(prompt, 60, ignore_eos=False))
    assert tokens_of(deltas) == expected
    assert expected[-1] == END
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert "".join(delta.text for delta in deltas) == "".join(f"{token} " for token in expected[:-1])


async def test_a_client_that_leaves_frees_its_place_within_one_step(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 2})
    stack.target.step_s = 0.01
    stream = await stack.dispatcher.submit(generation(max_tokens=200))
    other = asyncio.create_task(stack.run(generation((9, 9), 60)))
    await anext(stream)
    await eventually(lambda: len(stack.target.resident) == 2)
    before = len(stack.target.results)
    await stream.aclose()
    await eventually(lambda: len(stack.target.resident) == 1)
    assert len(stack.target.results) <= before + 1
    assert tokens_of(await other) == continuation((9, 9), 60)


async def test_a_verdict_that_comes_after_its_client_has_left_counts_for_nothing(make_stack: MakeStack) -> None:
    stack = await make_stack(drafting=False)
    stream = await stack.dispatcher.submit(generation(max_tokens=2))
    await anext(stream)
    stack.target.go.clear()
    await eventually(lambda: stack.target.num_plans == 2)
    await stream.aclose()
    stack.target.go.set()
    await stack.until_empty()
    assert stack.metric("outrider_generated_tokens_total") == 1
    assert stack.metric("outrider_requests_total", outcome="cancelled") == 1
    assert stack.metric("outrider_requests_total", outcome="length") == 0


@pytest.mark.parametrize("how", ["cancel the reader", "drop the stream"])
async def test_every_way_of_leaving_is_noticed(make_stack: MakeStack, how: str) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    stream = await stack.dispatcher.submit(generation(max_tokens=200))
    await anext(stream)
    if how == "cancel the reader":
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0.02)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    else:
        del stream
    await stack.until_empty()
    assert stack.metric("outrider_requests_total", outcome="cancelled") == 1


async def test_a_client_that_leaves_before_it_runs_leaves_no_trace(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 1})
    stack.target.step_s = 0.005
    first = await stack.dispatcher.submit(generation(max_tokens=100))
    placing = await stack.dispatcher.submit(generation((7,), 100))
    assert stack.dispatcher.status().waiting == 1
    await placing.aclose()
    assert stack.dispatcher.status().waiting == 0
    await first.aclose()
    # While the admission is still on its way:
    third = await stack.dispatcher.submit(generation((8,), 100))
    await third.aclose()
    await stack.until_empty()


async def test_five_hundred_mixed_requests_with_cancels_leave_nothing(make_stack: MakeStack) -> None:
    stack = await make_stack(target={"num_seats": 8, "num_blocks": 128}, max_waiting=600, queue_timeout_s=100.0)
    rng = random.Random(7)

    async def client(number: int) -> None:
        prompt = tuple(rng.randrange(1, 97) for _ in range(rng.choice((1, 3, 12, 40, 70))))
        max_tokens = rng.choice((1, 2, 5, 20, 40))
        seed = rng.choice((None, 11, 12))
        sampling = GREEDY if seed is None else SamplingOptions(temperature=0.7, seed=seed)
        leave_after = rng.choice((None, None, 0, 1, 3))
        wanted = generation(prompt, max_tokens, sampling=sampling, draft_len=rng.choice((0, 1, 4, None)))
        await asyncio.sleep(rng.random() * 0.5)
        stream = await stack.dispatcher.submit(wanted)
        tokens: list[int] = []
        async with stream:
            if leave_after == 0:
                return
            num_deltas = 0
            async for delta in stream:
                tokens += delta.token_ids
                num_deltas += 1
                if num_deltas == leave_after:
                    break
        expected = continuation(prompt, max_tokens, seed)
        assert tokens == (expected if leave_after is None else expected[: len(tokens)])

    await asyncio.gather(*(client(number) for number in range(500)))
    await stack.until_empty()
    stack.target.assert_empty()
    stack.drafter.assert_empty()
    assert stack.target.max_resident == 8
    assert stack.drafter.holes == 0
    assert stack.metric("outrider_waiting_requests") == 0
    assert stack.metric("outrider_running_requests") == 0
