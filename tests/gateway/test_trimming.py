"""What is kept of a verdict, and how is it counted?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.commits import apply_verdict
from gateway.generation import Generation, TokenLogprob
from gateway.messages import BadEvent, RowPlan, RowStatus, Verdict
from gateway.metrics import GatewayMetrics
from gateway.requests import ActiveRequest
from gateway.trimming import Trimmer
from tests.gateway.toy import ToyText

END = 50
STOP_TOKEN = 60


def trimmer(max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Trimmer:
    return Trimmer(ToyText(stop), frozenset({STOP_TOKEN}), frozenset({END}), max_tokens)


def logprobs(token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -float(token)) for token in token_ids)


@pytest.mark.parametrize(
    (
        "token_ids",
        "accepted",
        "drafted",
        "max_tokens",
        "stop",
        "kept",
        "kept_accepted",
        "kept_drafted",
        "text",
        "finish",
    ),
    [
        # The worked vector: [d1, d2, END, d4, d5, bonus] commits 3 and counts 3.
        ((1, 2, END, 4, 5, 6), 5, 5, 100, (), 3, 3, 3, "1 2 ", ("stop", None)),
        ((1, 2, 3), 2, 5, 100, (), 3, 2, 5, "1 2 3 ", (None, None)),
        ((1, STOP_TOKEN, 3), 2, 2, 100, (), 2, 2, 2, "1 ", ("stop", STOP_TOKEN)),
        ((1, 2, 3, 4), 3, 3, 2, (), 2, 2, 2, "1 2 ", ("length", None)),
        ((1, 2, 3), 2, 2, 3, (), 3, 2, 2, "1 2 3 ", ("length", None)),
        # On one and the same token: stop string before end token before length.
        ((1, 2, 3), 2, 2, 2, ("2 ",), 2, 2, 2, "1 ", ("stop", "2 ")),
        ((1, 2, END), 2, 2, 3, (), 3, 2, 2, "1 2 ", ("stop", None)),
        # A stop string that only comes after the end token, or past the length, is never looked at.
        ((1, END, 2), 2, 2, 100, ("2 ",), 2, 2, 2, "1 ", ("stop", None)),
        ((1, 2), 1, 1, 1, ("2 ",), 1, 1, 1, "1 ", ("length", None)),
        ((7,), 0, 3, 100, (), 1, 0, 3, "7 ", (None, None)),
    ],
)
def test_vectors(
    token_ids: tuple[int, ...],
    accepted: int,
    drafted: int,
    max_tokens: int,
    stop: tuple[str, ...],
    kept: int,
    kept_accepted: int,
    kept_drafted: int,
    text: str,
    finish: tuple[str | None, str | int | None],
) -> None:
    commit = trimmer(max_tokens, stop).apply(token_ids, accepted, drafted, logprobs(token_ids))
    assert commit.token_ids == token_ids[:kept]
    assert commit.logprobs == logprobs(token_ids[:kept])
    assert (commit.num_accepted, commit.num_drafted) == (kept_accepted, kept_drafted)
    assert commit.text == text
    assert (commit.finish_reason, commit.stop_reason) == finish


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=60),
    st.lists(st.integers(1, 8), min_size=1, max_size=60),
    st.integers(1, 50),
    st.sampled_from([(), ("7 ",), ("9 ", "3 ")]),
)
def test_how_tokens_are_split_over_verdicts_changes_nothing(
    token_ids: list[int], sizes: list[int], max_tokens: int, stop: tuple[str, ...]
) -> None:
    """Drafting decides how many tokens come at a time; what is kept must not depend on it."""

    def outcome(steps: list[int]) -> tuple[list[int], str, str | None, str | int | None]:
        one = trimmer(max_tokens, stop)
        kept: list[int] = []
        text = ""
        left = list(token_ids)
        for size in steps:
            part, left = tuple(left[:size]), left[size:]
            if not part:
                break
            commit = one.apply(part, len(part) - 1, len(part) - 1, ())
            kept += commit.token_ids
            text += commit.text
            if commit.finish_reason is not None:
                return kept, text, commit.finish_reason, commit.stop_reason
        return kept, text, None, None

    assert outcome([1] * len(token_ids)) == outcome([*sizes, len(token_ids)])


# What a verdict does to the record of its request, and to the counters.


def request(max_tokens: int = 20) -> ActiveRequest:
    generation = Generation("r", (1, 2, 3), max_tokens)
    return ActiveRequest(generation, 1, 0, 4, max_tokens, trimmer(max_tokens), now=0.0)


def verdict(token_ids: tuple[int, ...], context_len: int, **other: int) -> Verdict:
    num_accepted = other.get("num_accepted", max(0, len(token_ids) - 1))
    num_drafted = other.get("num_drafted", num_accepted)
    return Verdict("r", 1, RowStatus.OK, token_ids, num_accepted, num_drafted, context_len, ())


def test_counters_and_usage_are_trimmed_with_the_tokens() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, 7)
    one = request()
    row = RowPlan("r", 1, 3, 6, 5, 0, True)
    one.token_ids.append(9)  # the anchor
    delta = apply_verdict(one, row, verdict((1, 2, END, 4, 5, 6), 9, num_accepted=5), metrics, 1.0)
    assert delta is not None
    assert delta.token_ids == (1, 2, END)
    assert delta.from_draft == (True, True, True)
    assert delta.usage is not None
    assert delta.usage.completion_tokens == 4  # with the anchor of the step before
    assert (delta.usage.drafted_tokens, delta.usage.accepted_tokens) == (3, 3)

    def sample(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    assert sample("outrider_drafts_total") == 1
    assert sample("outrider_draft_tokens_total") == 3
    assert sample("outrider_accepted_tokens_total") == 3
    assert [sample("outrider_accepted_tokens_per_position_total", position=str(k)) for k in range(5)] == [1, 1, 1, 0, 0]
    assert sample("outrider_generated_tokens_total") == 3


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (RowPlan("r", 1, 0, 2, 0, 0, False), verdict((5,), 2)),
        (RowPlan("r", 1, 0, 2, 0, 0, False), verdict((), 3)),
        (RowPlan("r", 1, 0, 3, 0, 0, True), verdict((), 3)),
        (RowPlan("r", 1, 0, 3, 0, 0, True), verdict((5, 6), 4)),
        (RowPlan("r", 1, 0, 3, 0, 0, True), verdict((5,), 4)),
        (RowPlan("r", 1, 2, 3, 2, 0, True), verdict((5, 6), 4, num_accepted=2)),
        (RowPlan("r", 1, 2, 3, 2, 0, True), verdict((5, 6), 4, num_accepted=1, num_drafted=3)),
        (RowPlan("r", 1, 2, 3, 2, 0, True), verdict((5, 6), 4, num_accepted=1, num_drafted=0)),
    ],
)
def test_a_verdict_that_cannot_be_is_refused_and_changes_nothing(row: RowPlan, wrong: Verdict) -> None:
    one = request()
    with pytest.raises(BadEvent):
        apply_verdict(one, row, wrong, GatewayMetrics(CollectorRegistry(), 7), 1.0)
    assert one.token_ids == [1, 2, 3]
    assert one.context_len == 0
