"""Does sampled output depend on nothing but the request and its seed?

A seeded request gives the same tokens alone, in a crowd, with every draft_len and with any drafter; other seeds give
others.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end import test_greedy
from tests.end_to_end.stack import Stack
from tests.end_to_end.variants import prompts

NUM_TOKENS = 24
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cool-top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "greedy-penalties": {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {"40": 3.0, "41": -100}},
}
# By name, over the variants: what the first variant of the session answered; all others must agree.
_ANSWERS: dict[str, list[int]] = {}


def _tokens(stack: Stack, way: str, draft_len: int, seed: int = 1234) -> list[int]:
    fields = {**WAYS[way], "seed": seed, "draft_len": draft_len, "ignore_eos": True}
    return list(stack.complete(list(prompts()[7]), NUM_TOKENS, **fields)["choices"][0]["outrider"]["token_ids"])


@pytest.mark.parametrize("way", WAYS)
def test_seeded_output_depends_on_nothing_else(stack: Stack, way: str) -> None:
    alone = _tokens(stack, way, 0)
    assert len(alone) == NUM_TOKENS
    assert _ANSWERS.setdefault(way, alone) == alone  # whichever stack
    assert _tokens(stack, way, 4) == alone
    with ThreadPoolExecutor(9) as pool:
        crowd = [pool.submit(_tokens, stack, other, draft, seed) for other, draft, seed in _crowd()]
        again = pool.submit(_tokens, stack, way, 3)
        for one in crowd:
            one.result()
        assert again.result() == alone
    if WAYS[way]["temperature"]:
        assert _tokens(stack, way, 2, seed=99) != alone


test_everything_is_free_again = test_greedy.test_everything_is_free_again


def _crowd() -> list[tuple[str, int, int]]:
    return [(way, index % 5, index) for index, way in enumerate([*WAYS, *list(WAYS)[:2]])]
