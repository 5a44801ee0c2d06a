"""Is what users get from a GPU exactly what the target alone would have said?

Real processes in fp32 (TF32 off), against transformers' greedy `generate` on the CPU: run-ahead and lockstep, build and
reuse, graphs and none, device and host execution, starved of blocks. Seeded sampling must not tell the stacks apart.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.stack import Stack
from tests.end_to_end.test_sampling import WAYS
from tests.end_to_end.variants import Models, prompts
from tests.gpu.fleet import NEEDS_GPU, STACKS

pytestmark = [NEEDS_GPU, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS = 24
every_stack = pytest.mark.parametrize("stack_name", STACKS)
# By way of sampling, over the stacks: what the first of the session answered; all others must agree.
_ANSWERS: dict[str, list[int]] = {}


def _token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["outrider"]["token_ids"])


def _run(stack: Stack, prompt: tuple[int, ...], draft_len: int) -> list[int]:
    return _token_ids(stack.complete(list(prompt), NUM_TOKENS, draft_len=draft_len, ignore_eos=True))


@every_stack
def test_one_request(stack: Stack, models: Models) -> None:
    prompt = prompts()[5]
    answers = {draft_len: _run(stack, prompt, draft_len) for draft_len in range(8)}
    assert answers == dict.fromkeys(range(8), models.greedy(prompt, NUM_TOKENS))


@every_stack
@pytest.mark.parametrize("draft_len", [0, 3, 7])
def test_sixteen_at_once(stack: Stack, models: Models, stack_name: str, draft_len: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: _run(stack, prompt, draft_len), prompts()))
    assert answers == [models.greedy(prompt, NUM_TOKENS) for prompt in prompts()]
    if stack_name == "starved" and draft_len == 7:
        assert stack.metrics()["outrider_preemptions_total"] > 0


@every_stack
@pytest.mark.parametrize("num_rows", [3, 5, 11])
def test_batches_of_sizes_that_no_graph_has(stack: Stack, models: Models, num_rows: int) -> None:
    chosen = prompts()[:num_rows]
    with ThreadPoolExecutor(num_rows) as pool:
        answers = list(pool.map(lambda prompt: _run(stack, prompt, 2), chosen))
    assert answers == [models.greedy(prompt, NUM_TOKENS) for prompt in chosen]


@every_stack
def test_prefix_hits_change_nothing(stack: Stack, models: Models, stack_name: str) -> None:
    prompt = prompts()[6]
    answers = [stack.complete(list(prompt), NUM_TOKENS, draft_len=3, ignore_eos=True) for _ in range(3)]
    assert [_token_ids(answer) for answer in answers] == [models.greedy(prompt, NUM_TOKENS)] * 3
    cached = answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0 if stack_name == "reuse" else cached > 0


@every_stack
@pytest.mark.parametrize("way", WAYS)
def test_seeded_output_is_the_same_on_every_stack(stack: Stack, way: str) -> None:
    def tokens(draft_len: int) -> list[int]:
        fields = {**WAYS[way], "seed": 1234, "draft_len": draft_len, "ignore_eos": True}
        return _token_ids(stack.complete(list(prompts()[7]), NUM_TOKENS, **fields))

    alone = tokens(0)
    assert _ANSWERS.setdefault(way, alone) == alone
    assert tokens(4) == alone
    with ThreadPoolExecutor(6) as pool:
        crowd = list(pool.map(tokens, range(6)))
    assert crowd == [alone] * 6


@every_stack
def test_drafts_were_verified_and_everything_is_free_again(stack: Stack, stack_name: str) -> None:
    """The last test of each stack: without drafts the others would show nothing."""
    metrics = stack.metrics()
    assert metrics["outrider_draft_tokens_total"] > 0
    if stack_name == "draft-model":
        assert metrics["outrider_accepted_tokens_total"] > 0

    def free() -> bool:
        metrics = stack.metrics()
        return metrics["outrider_running_requests"] == 0 and metrics["outrider_cache_use_ratio"] == 0

    stack.wait_until("no block is held", free, 20)
    assert "Traceback" not in stack.log("target") + stack.log("drafter")
