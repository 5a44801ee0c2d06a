"""What does the gateway remember of one request while it lives?

`ActiveRequest` is the one mutable record; its target loop owns it and alone writes to it. The client's end is a
`DeltaStream`, which the loop feeds and the client drains; dropping it cancels the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from gateway.errors import GatewayError
from gateway.generation import Delta, Generation, GenerationUsage
from gateway.messages import Placement, RowPlan
from gateway.trimming import Trimmer


class Phase(Enum):
    """Where a request is. PLACING: admission asked for, not all answers in."""

    WAITING = "waiting"
    PLACING = "placing"
    RUNNING = "running"
    ENDED = "ended"


class Bond(Enum):
    """What the drafter has of a request.

    NONE: nothing. ASKED: admission sent. HELD: it follows the request's rows. REFUSED: it can never take it.
    """

    NONE = "none"
    ASKED = "asked"
    HELD = "held"
    REFUSED = "refused"


class DeltaStream:
    """The client's end of a request: iterate it for the deltas, in order; errors of the gateway's tree are raised from
    it.

    Leaving it early, by `aclose`, by `async with`, by cancelling the task that waits on it or by dropping the last
    reference, cancels the request. What waits here is bounded by the request's own max_tokens.
    """

    def __init__(self, request_id: str, on_leave: Callable[[], None]) -> None:
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._on_leave: Callable[[], None] | None = on_leave
        self._deltas: deque[Delta] = deque()
        self._error: GatewayError | None = None
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    # The loop's side.

    def put(self, delta: Delta) -> None:
        """Hand over one delta; one with a finish_reason is the last."""
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._over = True
            self._on_leave = None
        self._rouse()

    def fail(self, error: GatewayError) -> None:
        """End with an error, after the deltas already handed over."""
        self._error = error
        self._over = True
        self._on_leave = None
        self._rouse()

    def disown(self) -> None:
        """The request was not taken on: there is nothing to cancel."""
        self._over = True
        self._on_leave = None

    def _rouse(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The client's side.

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.leave()
                raise
            finally:
                self._waiter = None
        return self._deltas.popleft()

    def leave(self) -> None:
        """The client is gone: cancel the request if it still runs. Idempotent."""
        on_leave, self._on_leave = self._on_leave, None
        self._over = True
        if on_leave is not None:
            on_leave()

    async def aclose(self) -> None:
        """`leave`, in the shape that `contextlib.aclosing` wants."""
        self.leave()

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and after the loop has closed; then nothing is left to cancel.
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(on_leave)


class ActiveRequest:
    """One request from the door to its end.

    token_ids: the prompt, then what was generated and given out. arrival: its place in the order of ages; lower is
    older. epoch: of its newest placement. placed_len: tokens it was placed with, to be run as prompt before it decodes.
    context_len: tokens whose KV the target holds, as it last reported. ahead_rows, ahead_len, ahead_samples: its rows
    under way, their query tokens, and how many of them sample (each gives one token at least). stalled: it gets no
    further row until none is under way, because what is under way will not go as planned, or because the drafter must
    be told all of it. pending_drafts: drafts that the drafter was asked for in step `drafts_seq`, the last one sent
    with a row of it. last_planned: the loop's step count when it last had a row (or was placed). started_at: when the
    placement in which it first ran was asked for. bond_seq: the first step that the drafter can follow since it was
    last asked; bond_failures: how often in a row that came to nothing. stream: held weakly, so that a client that drops
    its end without a word is noticed.
    """

    __slots__ = (
        "ahead_len",
        "ahead_rows",
        "ahead_samples",
        "arrival",
        "bond",
        "bond_failures",
        "bond_not_before",
        "bond_seq",
        "cached_len",
        "context_len",
        "draft_len",
        "drafts_seq",
        "epoch",
        "faults",
        "first_cached_len",
        "first_token_at",
        "generation",
        "last_planned",
        "max_total_len",
        "num_accepted",
        "num_drafted",
        "pending_drafts",
        "phase",
        "placed_at",
        "placed_len",
        "prompt_len",
        "request_id",
        "seed",
        "stalled",
        "started_at",
        "starved_since",
        "stream",
        "submitted_at",
        "target_answered",
        "token_ids",
        "trimmer",
    )

    def __init__(
        self,
        generation: Generation,
        arrival: int,
        seed: int,
        draft_len: int,
        max_tokens: int,
        trimmer: Trimmer,
        now: float,
    ) -> None:
        self.generation = generation
        self.request_id = generation.request_id
        self.arrival = arrival
        self.seed = seed
        self.draft_len = draft_len
        self.prompt_len = len(generation.token_ids)
        self.max_total_len = self.prompt_len + max_tokens
        self.token_ids = list(generation.token_ids)
        self.trimmer = trimmer
        self.stream: Callable[[], DeltaStream | None] = lambda: None
        self.submitted_at = now
        self.first_token_at: float | None = None
        self.phase = Phase.WAITING
        self.started_at: float | None = None
        self.epoch = 1
        self.placed_at = 0.0
        self.placed_len = 0
        self.target_answered = False
        self.context_len = 0
        self.cached_len = 0
        self.first_cached_len: int | None = None
        self.ahead_rows = 0
        self.ahead_len = 0
        self.ahead_samples = 0
        self.stalled = False
        self.last_planned = 0
        self.bond = Bond.NONE
        self.bond_seq = 0
        self.bond_failures = 0
        self.bond_not_before = 0.0
        self.pending_drafts = 0
        self.drafts_seq = 0
        self.faults = 0
        self.starved_since: float | None = None
        self.num_drafted = 0
        self.num_accepted = 0

    @property
    def started(self) -> bool:
        """Whether it has ever run."""
        return self.started_at is not None

    @property
    def num_generated(self) -> int:
        """Tokens given out so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def planned_len(self) -> int:
        """context_len once all that is under way has run: exact while nothing is, and in the prompt; else at most so.

        One token, the last, never has its KV written.
        """
        return min(self.context_len + self.ahead_len, self.max_total_len - 1)

    @property
    def planned_remaining(self) -> int:
        """Tokens still to be generated once all that is under way has run, at most."""
        return self.trimmer.remaining - self.ahead_samples

    @property
    def can_be_planned(self) -> bool:
        """Whether the next step may have a row of it."""
        return self.phase is Phase.RUNNING and not self.stalled and self.planned_remaining > 0

    @property
    def in_prompt(self) -> bool:
        """Whether tokens it was placed with are still to be planned."""
        return self.planned_len < self.placed_len

    def row_sent(self, row: RowPlan) -> None:
        """A row of it is under way."""
        self.ahead_rows += 1
        self.ahead_len += row.query_len
        self.ahead_samples += row.samples

    def row_back(self, row: RowPlan) -> None:
        """A row of this placement is under way no longer."""
        self.ahead_rows -= 1
        self.ahead_len -= row.query_len
        self.ahead_samples -= row.samples
        self.stalled = self.stalled and self.ahead_rows > 0

    def to_be_placed(self, now: float) -> None:
        """It goes to the target, with all the tokens it has."""
        self.placed_at = now
        self.placed_len = len(self.token_ids)
        self.cached_len = self.placed_len - 1
        self.context_len = 0
        self.target_answered = False

    def unanswered_since(self, since: float) -> bool:
        """Whether the target has been asked to place it before `since` and has not answered."""
        return self.phase is Phase.PLACING and not self.target_answered and self.placed_at < since

    def forget_placement(self) -> None:
        """The placement is given up: what is under way of it counts for nothing."""
        self.context_len = 0
        self.ahead_rows = self.ahead_len = self.ahead_samples = 0
        self.stalled = False

    def placement(self, channel_id: str, mid_stream: bool) -> Placement:
        """What a service is told of it now."""
        return Placement(
            self.request_id,
            self.epoch,
            tuple(self.token_ids),
            self.prompt_len,
            self.max_total_len,
            self.generation.sampling,
            self.seed % 2**64,
            self.generation.sampling.seed is not None,
            channel_id,
            mid_stream,
        )

    def usage(self) -> GenerationUsage:
        """What it cost so far."""
        return GenerationUsage(
            self.prompt_len,
            self.num_generated,
            self.first_cached_len or 0,
            self.num_drafted,
            self.num_accepted,
        )
