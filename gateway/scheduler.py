"""Which rows make the next step, who is let in, and who gives way?

Policy only, without I/O or clocks: the target loop asks and carries out. It plans from where each request will stand
once all that is under way has run. Older goes before younger everywhere:

- admission is in order of arrival, and a request that gave way keeps its arrival, so it comes back at the head;
- a step takes decode rows first, then prompt chunks, under the token budget. Rows that had to sit out go first in the
  next step, and a prompt that sat out for too long is promised a part of the budget, so neither kind starves the other;
- a request under which a step failed is a suspect: its next step is its alone, so that it cannot take others with it
  again;
- when blocks run out, the youngest placed request gives way to an older one that is starved. The oldest of all never
  gives way, so something always gets on.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from gateway.messages import Capacity, RowPlan, TargetInfo
from gateway.requests import ActiveRequest, Bond, Phase

OVERDUE_STEPS = 8  # a prompt that sat out so many steps gets its part of the budget before any draft is verified
_by_arrival = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the target can take. usable_blocks: blocks that requests can hold together."""

    max_step_tokens: int
    max_running: int
    max_verify_len: int
    block_size: int
    usable_blocks: int

    @classmethod
    def of(cls, info: TargetInfo, max_step_tokens: int | None, max_running: int | None) -> Limits:
        """What a target says of itself, and what was configured below it."""
        return cls(
            min(max_step_tokens or info.max_step_tokens, info.max_step_tokens),
            min(max_running or info.num_seats, info.num_seats),
            info.max_verify_len,
            info.block_size,
            info.num_blocks,
        )

    def blocks(self, length: int) -> int:
        """Blocks for `length` tokens."""
        return -(-length // self.block_size)


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the drafter can do for the next step. drafts_from_seq: the step before it, if it drafts; 0: it does not."""

    max_draft_len: int
    drafts_from_seq: int


NO_DRAFTING = Drafting(0, 0)


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A row and the request it is of. ahead: planned while rows of the request were under way, so that its lengths are
    upper bounds.
    """

    request: ActiveRequest
    plan: RowPlan
    ahead: bool

    @property
    def is_current(self) -> bool:
        """Whether the request still runs in the placement that the row is of."""
        return self.request.phase is Phase.RUNNING and self.request.epoch == self.plan.epoch


class Scheduler:
    """The waiting and the placed requests of one target."""

    def __init__(self) -> None:
        self.waiting: list[ActiveRequest] = []
        self.placed: dict[str, ActiveRequest] = {}
        self._admission_held = False
        self._step = 0

    # Who is where.

    def holds(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self.placed or any(request.request_id == request_id for request in self.waiting)

    def enqueue(self, request: ActiveRequest) -> None:
        """Let it wait, in order of arrival."""
        request.phase = Phase.WAITING
        bisect.insort(self.waiting, request, key=_by_arrival)

    def place(self, request: ActiveRequest) -> None:
        """It is the head of the queue and goes to the target."""
        self.waiting.remove(request)
        request.phase = Phase.PLACING
        request.last_planned = self._step
        self.placed[request.request_id] = request

    def end(self, request: ActiveRequest) -> None:
        """It is over, wherever it was."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif self.placed.pop(request.request_id, None) is not None:
            self._admission_held = False
        request.phase = Phase.ENDED

    def send_back(self, request: ActiveRequest) -> None:
        """It loses its placement and waits again; what it has generated stays. The caller releases the old epoch."""
        del self.placed[request.request_id]
        request.epoch += 1
        request.forget_placement()
        self.enqueue(request)

    def give_way(self, starved: Collection[ActiveRequest]) -> ActiveRequest | None:
        """Who loses its placement so that the oldest starved request gets blocks. None: it is itself the youngest, and
        waits in place until an older one ends.

        Whoever goes would find the same blocks short again, so nobody is let in until a placed request has ended.
        """
        oldest = min(starved, key=_by_arrival)
        younger = [
            request
            for request in self.placed.values()
            if request.arrival > oldest.arrival and request.phase is Phase.RUNNING
        ]
        if not younger:
            return None
        self._admission_held = True
        return max(younger, key=_by_arrival)

    def next_admission(self, limits: Limits, capacity: Capacity) -> ActiveRequest | None:
        """The head of the queue, when it fits: a seat for it, and blocks for it beside what those placed will need
        soon.
        """
        if not self.waiting or len(self.placed) >= limits.max_running:
            return None
        head = self.waiting[0]
        if not self.placed:
            self._admission_held = False
            return head
        if self._admission_held:
            return None
        promised = sum(self._blocks_to_come(request, limits) for request in self.placed.values())
        return head if capacity.free_blocks - promised >= limits.blocks(len(head.token_ids) + 1) else None

    @staticmethod
    def _blocks_to_come(request: ActiveRequest, limits: Limits) -> int:
        """Blocks a placed request has still to take for the tokens it has, and one to grow into."""
        soon = limits.blocks(min(len(request.token_ids) + 1 + request.draft_len, request.max_total_len))
        return max(0, soon - limits.blocks(request.context_len)) + 1

    # The next step.

    def plan_rows(self, limits: Limits, drafting: Drafting) -> list[ScheduledRow]:
        """The rows of the next step, in canonical order; empty: nothing can run."""
        running = [request for request in self.placed.values() if request.can_be_planned]
        if not running:
            return []
        if any(request.faults for request in running):
            running = self._apart(running)
        prompts = [request for request in running if request.in_prompt]
        decodes = [request for request in running if not request.in_prompt]
        prompts.sort(key=_by_arrival)
        decodes.sort(key=lambda request: (request.last_planned, request.arrival))
        self._step += 1
        budget = limits.max_step_tokens
        reserve = 0
        if any(self._step - request.last_planned > OVERDUE_STEPS for request in prompts):
            # The one most overdue goes first, or the oldest prompt could keep the others out.
            prompts.sort(key=lambda request: (request.last_planned, request.arrival))
            reserve = max(1, budget // 4)
        rows = self._decode_rows(decodes, budget - reserve, limits, drafting)
        budget -= sum(row.plan.query_len for row in rows)
        rows.extend(self._prompt_rows(prompts, budget, limits, drafting))
        return rows

    @staticmethod
    def _apart(running: list[ActiveRequest]) -> list[ActiveRequest]:
        """One suspect alone, or all that are none; whoever has waited longer."""
        suspect = min((r for r in running if r.faults), key=lambda r: (r.last_planned, r.arrival))
        others = [r for r in running if not r.faults]
        if not others or suspect.last_planned <= min(r.last_planned for r in others):
            return [suspect]
        return others

    def _decode_rows(
        self, decodes: list[ActiveRequest], budget: int, limits: Limits, drafting: Drafting
    ) -> list[ScheduledRow]:
        """Each gets its anchor; what is left of the budget goes to drafts, in the same order."""
        decodes = decodes[: max(0, budget)]
        spare = budget - len(decodes)
        rows = []
        for request in decodes:
            verify_len = 0
            if request.pending_drafts and request.drafts_seq == drafting.drafts_from_seq:
                verify_len = min(request.pending_drafts, request.planned_remaining - 1, limits.max_verify_len, spare)
                spare -= verify_len
            rows.append(self._row(request, 1 + verify_len, verify_len, True, limits, drafting))
        return rows

    def _prompt_rows(
        self, prompts: list[ActiveRequest], budget: int, limits: Limits, drafting: Drafting
    ) -> list[ScheduledRow]:
        rows = []
        for request in prompts:
            if budget <= 0:
                break
            left = request.placed_len - request.planned_len
            query_len = min(left, budget)
            budget -= query_len
            rows.append(self._row(request, query_len, 0, query_len == left, limits, drafting))
        return rows

    def _row(
        self,
        request: ActiveRequest,
        query_len: int,
        verify_len: int,
        samples: bool,
        limits: Limits,
        drafting: Drafting,
    ) -> ScheduledRow:
        request.last_planned = self._step
        draft_len = 0
        if samples and request.bond is Bond.HELD:
            # This step gives at least one token and the next one ends with the target's own: more drafts than fit
            # between them could never be kept.
            room = request.planned_remaining - 2
            draft_len = max(0, min(request.draft_len, drafting.max_draft_len, limits.max_verify_len, room))
        plan = RowPlan(
            request.request_id, request.epoch, request.planned_len, query_len, verify_len, draft_len, samples
        )
        return ScheduledRow(request, plan, request.ahead_rows > 0)
