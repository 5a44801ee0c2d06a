"""Who runs, who is let in, who gives way? Policy alone, against made-up verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation import Generation
from gateway.messages import Capacity
from gateway.requests import ActiveRequest, Bond, Phase
from gateway.scheduler import NO_DRAFTING, OVERDUE_STEPS, Drafting, Limits, Scheduler
from gateway.trimming import Trimmer
from tests.gateway.toy import ToyText

LIMITS = Limits(max_step_tokens=32, max_running=4, max_verify_len=7, block_size=4, usable_blocks=64)
PLENTY = Capacity(4, 64)


def request(arrival: int, prompt_len: int = 8, max_tokens: int = 100, draft_len: int = 4) -> ActiveRequest:
    text = Trimmer(ToyText(), frozenset(), frozenset(), max_tokens)
    return ActiveRequest(
        Generation(f"r{arrival}", (1,) * prompt_len, max_tokens), arrival, 0, draft_len, max_tokens, text, 0.0
    )


def run(scheduler: Scheduler, one: ActiveRequest, decoding: bool = False) -> ActiveRequest:
    """Place it, and let it be in its prompt or past it."""
    scheduler.enqueue(one)
    scheduler.place(one)
    one.phase = Phase.RUNNING
    one.placed_len = len(one.token_ids)
    if decoding:
        one.context_len = one.placed_len
        one.token_ids.append(7)
        one.bond = Bond.HELD
    return one


def advance(scheduler: Scheduler, limits: Limits, drafting: Drafting = NO_DRAFTING) -> dict[str, tuple[int, int, int]]:
    """One step whose rows all run: id -> (query_len, verify_len, draft_len)."""
    rows = scheduler.plan_rows(limits, drafting)
    for row in rows:
        one, plan = row.request, row.plan
        assert plan.context_len == one.context_len
        if one.in_prompt:
            one.context_len += plan.query_len
            if plan.samples:
                one.token_ids.append(7)
        else:
            one.context_len += 1
            one.token_ids.append(7)
    return {row.plan.request_id: (row.plan.query_len, row.plan.verify_len, row.plan.draft_len) for row in rows}


def test_decode_rows_come_first_and_prompts_share_the_rest() -> None:
    scheduler = Scheduler()
    run(scheduler, request(1, prompt_len=40))
    run(scheduler, request(2), decoding=True)
    rows = scheduler.plan_rows(LIMITS, NO_DRAFTING)
    assert [(row.plan.request_id, row.plan.query_len, row.plan.samples) for row in rows] == [
        ("r2", 1, True),
        ("r1", 31, False),
    ]


def test_drafts_wait_only_for_the_step_before() -> None:
    scheduler = Scheduler()
    one = run(scheduler, request(1), decoding=True)
    one.pending_drafts, one.drafts_seq = 4, 5
    assert advance(scheduler, LIMITS, Drafting(4, 5))["r1"] == (5, 4, 4)
    assert advance(scheduler, LIMITS, Drafting(4, 6))["r1"] == (1, 0, 4)
    assert advance(scheduler, LIMITS, NO_DRAFTING)["r1"] == (1, 0, 0)


@pytest.mark.parametrize(
    ("remaining", "pending", "verify_len", "draft_len"), [(1, 4, 0, 0), (2, 4, 1, 0), (3, 4, 2, 1), (9, 4, 4, 4)]
)
def test_no_more_is_drafted_than_can_be_kept(remaining: int, pending: int, verify_len: int, draft_len: int) -> None:
    scheduler = Scheduler()
    one = run(scheduler, request(1), decoding=True)
    one.trimmer.remaining = remaining
    one.pending_drafts, one.drafts_seq = pending, 5
    assert advance(scheduler, LIMITS, Drafting(7, 5))["r1"] == (1 + verify_len, verify_len, draft_len)


@pytest.mark.parametrize(
    ("own", "drafter", "target", "bond", "expected"),
    [
        (4, 7, 7, Bond.HELD, 4),
        (6, 3, 7, Bond.HELD, 3),
        (6, 7, 2, Bond.HELD, 2),
        (4, 7, 7, Bond.ASKED, 0),
        (0, 7, 7, Bond.NONE, 0),
    ],
)
def test_draft_len_is_the_smallest_of_all_limits(
    own: int, drafter: int, target: int, bond: Bond, expected: int
) -> None:
    scheduler = Scheduler()
    run(scheduler, request(1, draft_len=own), decoding=True).bond = bond
    limits = replace(LIMITS, max_verify_len=target)
    assert advance(scheduler, limits, Drafting(drafter, 0))["r1"][2] == expected


def test_when_the_budget_is_short_anchors_go_before_drafts_and_rows_take_turns() -> None:
    scheduler = Scheduler()
    for arrival in (1, 2, 3, 4):
        one = run(scheduler, request(arrival), decoding=True)
        one.pending_drafts, one.drafts_seq = 4, 9
    assert advance(scheduler, replace(LIMITS, max_step_tokens=7), Drafting(4, 9)) == {
        "r1": (4, 3, 4),
        "r2": (1, 0, 4),
        "r3": (1, 0, 4),
        "r4": (1, 0, 4),
    }
    tight = replace(LIMITS, max_step_tokens=3)
    turns = [sorted(advance(scheduler, tight)) for _ in range(4)]
    assert turns == [["r1", "r2", "r3"], ["r1", "r2", "r4"], ["r1", "r2", "r3"], ["r1", "r2", "r4"]]


def test_a_prompt_is_not_kept_out_for_ever() -> None:
    scheduler = Scheduler()
    for arrival in (1, 2, 3):
        run(scheduler, request(arrival), decoding=True)
    run(scheduler, request(4, prompt_len=6))
    tight = replace(LIMITS, max_step_tokens=3)
    waited = 0
    while "r4" not in advance(scheduler, tight):
        waited += 1
        assert waited <= OVERDUE_STEPS + 1
    for _ in range(8 * (OVERDUE_STEPS + 2)):
        advance(scheduler, tight)
    assert not scheduler.placed["r4"].in_prompt


def test_admission_is_in_order_and_the_head_is_not_overtaken() -> None:
    scheduler = Scheduler()
    run(scheduler, request(1), decoding=True)
    scheduler.enqueue(request(3, prompt_len=4))
    scheduler.enqueue(request(2, prompt_len=100))
    assert scheduler.next_admission(LIMITS, Capacity(3, 10)) is None, "r3 would fit, but r2 is before it"
    head = scheduler.next_admission(LIMITS, Capacity(3, 60))
    assert head is not None
    assert head.request_id == "r2"


def test_blocks_promised_to_placed_prompts_are_not_given_away() -> None:
    scheduler = Scheduler()
    run(scheduler, request(1, prompt_len=100))  # 26 blocks to come, none taken yet
    scheduler.enqueue(request(2, prompt_len=100))
    assert scheduler.next_admission(LIMITS, Capacity(3, 52)) is None
    assert scheduler.next_admission(LIMITS, Capacity(3, 60)) is not None


def test_seats_bound_admission() -> None:
    scheduler = Scheduler()
    for arrival in (1, 2, 3, 4):
        run(scheduler, request(arrival))
    scheduler.enqueue(request(5))
    assert scheduler.next_admission(LIMITS, PLENTY) is None


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = Scheduler()
    first, second, third = (run(scheduler, request(arrival), decoding=True) for arrival in (1, 2, 3))
    scheduler.enqueue(request(4))
    assert scheduler.give_way([second, first]) is third
    scheduler.send_back(third)
    assert third.epoch == 2
    assert [one.request_id for one in scheduler.waiting] == ["r3", "r4"]
    assert scheduler.next_admission(LIMITS, PLENTY) is None, "nobody has ended: the blocks would be short again"
    scheduler.end(first)
    assert scheduler.next_admission(LIMITS, PLENTY) is third


def test_the_youngest_itself_waits_in_place_when_it_starves() -> None:
    scheduler = Scheduler()
    run(scheduler, request(1), decoding=True)
    second = run(scheduler, request(2), decoding=True)
    assert scheduler.give_way([second]) is None


def test_suspects_run_alone() -> None:
    scheduler = Scheduler()
    first, _, third, _ = (run(scheduler, request(arrival), decoding=True) for arrival in (1, 2, 3, 4))
    first.faults = third.faults = 1
    steps = [sorted(advance(scheduler, LIMITS)) for _ in range(3)]
    assert steps == [["r1"], ["r3"], ["r2", "r4"]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.integers(0, 7)), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_no_step_is_over_its_budget_and_nobody_starves(requests: list[tuple[int, bool, int]], budget: int) -> None:
    scheduler = Scheduler()
    for arrival, (prompt_len, decoding, pending) in enumerate(requests, 1):
        run(scheduler, request(arrival, prompt_len, 10_000), decoding).pending_drafts = pending
    limits = replace(LIMITS, max_step_tokens=budget)
    last_seen = {f"r{arrival}": 0 for arrival in range(1, len(requests) + 1)}
    for step in range(1, 200):
        rows = advance(scheduler, limits, Drafting(7, 0))
        assert rows
        assert sum(query_len for query_len, _, _ in rows.values()) <= budget
        for request_id in rows:
            last_seen[request_id] = step
        # Every one of the eight has its turn within the rounds that the budget needs for all, and the aging limit.
        assert all(step - seen <= len(requests) * (OVERDUE_STEPS + 2) for seen in last_seen.values())
