"""Is what users get exactly what the target alone would have said?

Every variant of variants.py, against transformers' greedy `generate` on the same weights in fp32: each draft_len, one
request and sixteen at once, prompts cut into chunks, prefix hits, preemption. The last test of a stack counts that
nothing leaked.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.stack import Stack
from tests.end_to_end.variants import Models, Variant, prompts

NUM_TOKENS = 24


def _token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["outrider"]["token_ids"])


@pytest.mark.parametrize("draft_len", range(8))
def test_one_request(stack: Stack, models: Models, draft_len: int) -> None:
    prompt = prompts()[5]
    answer = stack.complete(list(prompt), NUM_TOKENS, draft_len=draft_len, ignore_eos=True)
    assert _token_ids(answer) == models.greedy(prompt, NUM_TOKENS)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    if draft_len == 0:
        assert answer["usage"]["outrider"]["drafted_tokens"] == 0


@pytest.mark.parametrize("draft_len", [0, 3, 7])
def test_sixteen_at_once(stack: Stack, models: Models, variant: Variant, draft_len: int) -> None:
    def run(prompt: tuple[int, ...]) -> list[int]:
        return _token_ids(stack.complete(list(prompt), NUM_TOKENS, draft_len=draft_len, ignore_eos=True))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, prompts()))
    assert answers == [models.greedy(prompt, NUM_TOKENS) for prompt in prompts()]
    if variant.preempts:
        assert stack.metrics()["outrider_preemptions_total"] > 0


def test_prefix_hits_change_nothing(stack: Stack, models: Models, variant: Variant) -> None:
    prompt = prompts()[6]
    answers = [stack.complete(list(prompt), NUM_TOKENS, draft_len=3, ignore_eos=True) for _ in range(3)]
    assert [_token_ids(answer) for answer in answers] == [models.greedy(prompt, NUM_TOKENS)] * 3
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    if "eagle3-reuse" in variant.name:
        assert cached == [0, 0, 0]  # draft KV in a shared block would depend on another request's next token
    else:
        assert cached[-1] > 0


def test_drafts_are_accepted_where_they_are_right(stack: Stack, variant: Variant) -> None:
    """Losslessness proves nothing where every draft is rejected: these variants must have accepted some."""
    if variant.drafts_accepted:
        assert stack.metrics()["outrider_accepted_tokens_total"] > 0
    assert stack.metrics()["outrider_draft_tokens_total"] > 0


def test_everything_is_free_again(stack: Stack) -> None:
    def free() -> bool:
        metrics = stack.metrics()
        return metrics["outrider_running_requests"] == 0 and metrics["outrider_cache_use_ratio"] == 0

    stack.wait_until("no block is held", free, 20)
