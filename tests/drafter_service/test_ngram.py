"""Does prompt lookup find what a search over the whole text would find, at the cost of the new tokens alone?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ngram import NgramIndex, NgramSpeculator
from drafter_service.residency import Warmth
from tests.drafter_service.harness import Harness, prompt_of


def search(tokens: list[int], min_n: int, max_n: int, num: int) -> list[int]:
    """The definition: longest suffix first, most recent earlier occurrence, and copying on from the copy."""
    for size in range(max_n, min_n - 1, -1):
        suffix = tokens[len(tokens) - size :] if size <= len(tokens) else None
        if suffix is None:
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                text = list(tokens)
                for offset in range(num):
                    text.append(text[start + size + offset])
                return text[len(tokens) :]
    return []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=6),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 3),
    num=st.integers(0, 9),
)
def test_index_equals_search(pieces: list[list[int]], min_n: int, extra: int, num: int) -> None:
    index, tokens = NgramIndex(min_n, min_n + extra), list[int]()
    for piece in pieces:
        tokens.extend(piece)
        index.extend(tokens)
        assert index.draft(tokens, num) == search(tokens, min_n, min_n + extra, num)


def test_a_shorter_text_is_indexed_anew() -> None:
    index = NgramIndex(2, 3)
    index.extend([1, 2, 3, 1, 2, 9, 9])
    shorter = [1, 2, 5, 1, 2]
    index.extend(shorter)
    assert index.draft(shorter, 3) == [5, 1, 2]


def test_each_token_is_taken_up_once() -> None:
    class Counting(list[int]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(key)

    index, tokens = NgramIndex(2, 4), Counting(range(2000))
    index.extend(tokens)
    Counting.reads = 0
    for token in range(50):
        tokens.append(token)
        index.extend(tokens)
        index.draft(tokens, 4)
    # Three n-grams taken up, three looked up, four tokens copied, a step: nothing that grows with the text.
    assert Counting.reads <= 50 * 10


def test_follows_and_drafts(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(NgramSpeculator(2, 4, 7))
    prompt = prompt_of(6, 1) * 3
    request = harness.target.add("r", prompt)
    assert harness.admit(request, mid_stream=False) == len(prompt) - 1
    for _ in range(40):
        report = harness.step(4, chunk=7)
        assert report is not None
        if request.context_len < len(prompt):
            assert request.drafts == []
            continue
        assert request.drafts == search(request.tokens, 2, 4, 4)
        assert report.metadata_builds == 0
    assert request.num_accepted > 0


def test_catches_up_from_its_tokens_and_goes_cold_over_a_hole(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(NgramSpeculator(2, 4, 7))
    request = harness.target.add("r", prompt_of(4, 1) * 4)
    harness.step(0)
    harness.step(0)
    harness.admit(request, mid_stream=True)
    harness.step(4)
    assert request.drafts == search(request.tokens, 2, 4, 4)
    harness.step(4, publish=False)
    harness.step(4, publish=False)
    report = harness.step(4)
    assert report is not None
    assert report.cold_request_ids == ("r",)
    assert request.drafts == []
    assert harness.resident("r").warmth is Warmth.COLD
    harness.admit(request, mid_stream=True)
    report = harness.step(4)
    assert report is not None
    assert report.cold_request_ids == ()
    assert request.drafts == search(request.tokens, 2, 4, 4)


@pytest.mark.parametrize("max_total_len", [19, 22])
def test_room(make_harness: Callable[..., Harness], max_total_len: int) -> None:
    harness = make_harness(NgramSpeculator(1, 3, 7))
    request = harness.add("r", [5, 6, 7] * 6, max_total_len=max_total_len)
    harness.step(7)
    assert request.context_len == 18
    assert len(request.drafts) <= max(0, max_total_len - 20)  # after 19 tokens; the last is the target's own
