"""What is under way, and what is planned from it? Without a target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.flights import Flights
from gateway.messages import BadEvent, Capacity, RowStatus, StepPlan, StepResult, Verdict
from gateway.requests import Bond, Phase
from gateway.scheduler import Drafting, Scheduler
from tests.gateway.test_scheduler import LIMITS, request, run


def fly(scheduler: Scheduler, flights: Flights, seq: int, drafting: Drafting) -> StepPlan:
    """Plan a step and send it."""
    rows = scheduler.plan_rows(LIMITS, drafting)
    plan = StepPlan(seq, "", 0, tuple(row.plan for row in rows), 0, 100, 3)
    flights.sent(plan, rows, 0.0)
    for row in rows:
        row.request.pending_drafts, row.request.drafts_seq = row.plan.draft_len, seq
    return plan


def result_of(plan: StepPlan, outcome: Callable[[int], tuple[RowStatus, int]]) -> StepResult:
    """A result of these rows: by index, the status and context_len."""
    verdicts = []
    for index, row in enumerate(plan.rows):
        status, context_len = outcome(index)
        verdicts.append(Verdict(row.request_id, row.epoch, status, (), 0, 0, context_len, ()))
    return StepResult(plan.seq, tuple(verdicts), Capacity(1, 1), 0, 0, 0, 0, False)


def test_bounds_tighten_with_the_verdicts() -> None:
    scheduler, flights = Scheduler(), Flights()
    one = run(scheduler, request(1), decoding=True)
    one.context_len, one.pending_drafts, one.drafts_seq = 8, 4, 1
    rows = [fly(scheduler, flights, seq, Drafting(4, seq - 1)).rows[0] for seq in (2, 3, 4)]
    assert [(row.context_len, row.query_len) for row in rows] == [(8, 5), (13, 5), (18, 5)]
    assert one.planned_remaining == 97
    one.context_len = 10  # one draft of four was accepted
    flights.landed(0.0)
    assert one.planned_len == 20
    assert fly(scheduler, flights, 5, Drafting(4, 4)).rows[0].context_len == 20
    for _ in range(3):
        flights.landed(0.0)
    assert (one.planned_len, one.ahead_rows, one.ahead_len, one.ahead_samples) == (10, 0, 0, 0)


def test_bounds_stay_within_the_request() -> None:
    scheduler, flights = Scheduler(), Flights()
    one = run(scheduler, request(1, prompt_len=8, max_tokens=6), decoding=True)
    one.trimmer.remaining, one.context_len = 5, 8
    one.pending_drafts, one.drafts_seq = 4, 1
    plans = [fly(scheduler, flights, seq, Drafting(4, seq - 1)) for seq in range(2, 9)]
    assert [len(plan.rows) for plan in plans] == [1, 1, 1, 1, 1, 0, 0]
    for plan in plans[:5]:
        assert plan.rows[0].context_len < one.max_total_len
    # Each row gives a token at least, and what a step drafts must be of use in the next.
    assert [plan.rows[0].verify_len for plan in plans[:5]] == [4, 3, 2, 1, 0]
    assert [plan.rows[0].draft_len for plan in plans[:5]] == [3, 2, 1, 0, 0]


def test_a_stalled_request_waits_until_nothing_of_it_is_under_way() -> None:
    scheduler, flights = Scheduler(), Flights()
    one = run(scheduler, request(1, prompt_len=100))
    other = run(scheduler, request(2), decoding=True)
    fly(scheduler, flights, 1, Drafting(0, 0))
    fly(scheduler, flights, 2, Drafting(0, 0))
    one.stalled = True
    flights.landed(0.0)
    assert [row.request for row in scheduler.plan_rows(LIMITS, Drafting(0, 0))] == [other]
    flights.landed(0.0)
    assert not one.stalled
    assert one.planned_len == 0
    assert {row.request.request_id for row in scheduler.plan_rows(LIMITS, Drafting(0, 0))} == {"r1", "r2"}


def test_a_placement_given_up_takes_its_rows_with_it() -> None:
    scheduler, flights = Scheduler(), Flights()
    one = run(scheduler, request(1), decoding=True)
    fly(scheduler, flights, 1, Drafting(4, 0))
    one.stalled = True
    scheduler.send_back(one)
    assert (one.ahead_rows, one.ahead_len, one.ahead_samples, one.stalled) == (0, 0, 0, False)
    scheduler.place(one)
    one.phase = Phase.RUNNING
    flights.landed(0.0)  # the old placement's row
    assert (one.ahead_rows, one.ahead_len, one.ahead_samples) == (0, 0, 0)


def test_results_come_in_order_and_only_rows_planned_ahead_are_skipped() -> None:
    scheduler, flights = Scheduler(), Flights()
    run(scheduler, request(1, draft_len=0), decoding=True).bond = Bond.NONE
    plans = [fly(scheduler, flights, seq, Drafting(0, 0)) for seq in (1, 2)]
    with pytest.raises(BadEvent, match="not the one under way"):
        flights.answered_by(result_of(plans[1], lambda _: (RowStatus.OK, 9)))
    with pytest.raises(BadEvent, match="skipped"):
        flights.answered_by(result_of(plans[0], lambda _: (RowStatus.SKIPPED, 8)))
    flights.landed(0.0)
    assert flights.answered_by(result_of(plans[1], lambda _: (RowStatus.SKIPPED, 8))).plan is plans[1]
    assert flights.failed(1, 0.0) is None
    flight = flights.failed(2, 0.0)
    assert flight is not None
    assert flight.plan is plans[1]
    assert not flights


def test_the_oldest_step_is_overdue_from_when_the_one_before_it_was_done() -> None:
    scheduler, flights = Scheduler(), Flights()
    run(scheduler, request(1), decoding=True)
    fly(scheduler, flights, 1, Drafting(0, 0))
    fly(scheduler, flights, 2, Drafting(0, 0))
    assert flights.overdue(1.0)
    flights.landed(5.0)
    assert not flights.overdue(4.0)
    assert flights.overdue(6.0)
