"""Which steps are under way on the target, and which rows do they hold?

Plans are sent up to `depth` ahead of the verdicts (1: lockstep) and answered in the order in which they were sent. Each
request's record says what of it is under way (`ActiveRequest.ahead_*`); this is the one place that keeps it so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.messages import BadEvent, RowStatus, StepPlan, StepResult
from gateway.scheduler import ScheduledRow


@dataclass(frozen=True, slots=True)
class Flight:
    """One step under way. number: counted over all steps of the target, whatever channel they name."""

    number: int
    plan: StepPlan
    rows: list[ScheduledRow]
    sent_at: float


class Flights:
    """The steps under way, oldest first."""

    def __init__(self) -> None:
        self.num_sent = 0
        self._flights: deque[Flight] = deque()
        self._moved_at = 0.0  # when the last verdict came

    def __len__(self) -> int:
        return len(self._flights)

    def sent(self, plan: StepPlan, rows: list[ScheduledRow], now: float) -> None:
        """A plan has been sent."""
        self.num_sent += 1
        self._flights.append(Flight(self.num_sent, plan, rows, now))
        for row in rows:
            row.request.row_sent(row.plan)

    def answered_by(self, result: StepResult) -> Flight:
        """The step that a result is of, still under way. Raises BadEvent: it is not the oldest, or has other rows."""
        flight = self._flights[0] if self._flights else None
        if flight is None or result.seq != flight.plan.seq or len(result.verdicts) != len(flight.rows):
            raise BadEvent(f"step {result.seq} is not the one under way, or its rows are not those planned")
        for row, verdict in zip(flight.rows, result.verdicts, strict=True):
            if row.is_current and verdict.request_id != row.plan.request_id:
                raise BadEvent(f"a verdict for {verdict.request_id!r} in the place of {row.plan.request_id!r}")
            if row.is_current and verdict.status is RowStatus.SKIPPED and not row.ahead:
                raise BadEvent(f"{row.plan.request_id!r} was skipped although nothing of it was under way")
        return flight

    def landed(self, now: float) -> None:
        """The oldest step's verdict has been taken."""
        self._moved_at = now
        for row in self._flights.popleft().rows:
            if row.is_current:
                row.request.row_back(row.plan)

    def failed(self, seq: int, now: float) -> Flight | None:
        """The oldest step could not be run, if that is its seq; it is under way no longer."""
        if not self._flights or self._flights[0].plan.seq != seq:
            return None
        self._moved_at = now
        return self._flights.popleft()

    def lost(self) -> Iterator[ScheduledRow]:
        """Nothing is under way any more: the rows that were."""
        while self._flights:
            yield from self._flights.popleft().rows

    def overdue(self, since: float) -> bool:
        """Whether the oldest step has been the target's next one since before `since`."""
        return bool(self._flights) and max(self._flights[0].sent_at, self._moved_at) < since
