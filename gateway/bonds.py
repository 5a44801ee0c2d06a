"""Which requests does the drafter follow, and what may the next step expect of it?

Keeps each request's bond to the drafter: asks at placement, asks anew (mid-stream) whenever the drafter has lost it,
and forgets all bonds with the channel. The drafter must see every step of a request from the moment it was asked to
follow it; so bonds are asked for only while no row of the request is under way, and every step of a bound request
names the channel. A request with draft_len 0 is never bound. Without a configured drafter everything here is a quiet
"no".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gateway.config import GatewayConfig
from gateway.drafter_link import DrafterLink
from gateway.messages import AdmitStatus, Admitted, ChannelOpened, DraftReport, StepPlan
from gateway.metrics import GatewayMetrics
from gateway.requests import ActiveRequest, Bond, Phase
from gateway.scheduler import NO_DRAFTING, Drafting, ScheduledRow

FIRST_PAUSE_S = 0.05  # before a request is asked for again that the drafter could not follow twice in a row
MAX_PAUSE_S = 5.0


class Bonds:
    """The bonds of one target's requests to one drafter.

    placed: the target loop's own record of placed requests; read, and only the bonds in it written. on_new_channel:
    steps are counted from 1 again. on_answer: the drafter has answered for a request, or all bonds are gone; what
    waited may go on.
    """

    def __init__(
        self,
        config: GatewayConfig,
        gateway_id: str,
        metrics: GatewayMetrics,
        placed: Mapping[str, ActiveRequest],
        on_answer: Callable[[], None],
    ) -> None:
        self._deadline_ms = config.step_deadline_ms
        self._ahead = config.depth - 1
        self._metrics = metrics
        self._placed = placed
        self._on_answer = on_answer
        self._seq = 0
        self._seq_channel: tuple[str, int] | None = None
        self._drafts_seq = 0  # the last step, if drafts were asked for in it
        self.link: DrafterLink | None = None
        if config.drafter is not None:
            self.link = DrafterLink(
                config.drafter,
                config.target,
                gateway_id,
                config.reconnect_min_s,
                config.reconnect_max_s,
                config.max_queued_commands,
                on_ready=self._on_ready,
                on_lost=self._on_lost,
                on_admitted=self._on_admitted,
                on_report=self._on_report,
                max_ahead=config.depth,
            )

    # Asking and releasing.

    def ask(self, request: ActiveRequest, mid_stream: bool) -> None:
        """Ask the drafter to follow a request from the next step on, where there is a drafter and use for it."""
        link = self.link
        request.bond = Bond.NONE
        request.pending_drafts = 0
        if link is None or link.channel is None or not link.keeps_up or not request.draft_len:
            return
        if link.admit(request.placement(link.channel.channel_id, mid_stream)):
            request.bond = Bond.ASKED
            request.bond_seq = self._next_seq(link.channel)

    def ask_anew(self, now: float) -> None:
        """Ask for the running requests that the drafter does not follow. Those with rows under way are held until they
        have none: what the drafter is told then is all that there is.
        """
        if self.link is None or not self.link.keeps_up:
            return
        for request in self._placed.values():
            if (
                request.bond is Bond.NONE
                and request.phase is Phase.RUNNING
                and request.draft_len
                and request.trimmer.remaining > 2
                and request.bond_not_before <= now
            ):
                if request.ahead_rows:
                    request.stalled = True
                else:
                    self.ask(request, mid_stream=True)

    def unbind(self, request: ActiveRequest) -> None:
        """The drafter does not follow it: ask again, at once the first time and after growing pauses then."""
        request.bond = Bond.NONE
        request.pending_drafts = 0
        request.bond_failures += 1
        pause = (
            0.0
            if request.bond_failures == 1
            else min(FIRST_PAUSE_S * 2.0 ** min(request.bond_failures, 16), MAX_PAUSE_S)
        )
        request.bond_not_before = time.monotonic() + pause

    def give_up_waiting(self, request: ActiveRequest) -> None:
        """The drafter has not answered for it in time."""
        self.unbind(request)
        if self.link is not None:
            self.link.unanswered()

    def release(self, request: ActiveRequest) -> None:
        """The request leaves its placement."""
        request.bond = Bond.NONE
        request.pending_drafts = 0
        if self.link is not None:
            self.link.release(request.request_id)

    # Steps.

    def drafting(self) -> Drafting:
        """What the next step may count on."""
        link = self.link
        if link is None or not link.keeps_up or link.info is None:
            return NO_DRAFTING
        return Drafting(link.info.max_draft_len, self._drafts_seq)

    def step_of(self, rows: list[ScheduledRow], drafting: Drafting) -> StepPlan:
        """The next step, with these rows."""
        channel = self._channel_of(rows)
        return StepPlan(
            self._number_step(channel),
            channel.channel_id if channel is not None else "",
            channel.channel_epoch if channel is not None else 0,
            tuple([row.plan for row in rows]),
            drafting.drafts_from_seq if any(row.plan.verify_len for row in rows) else 0,
            self._deadline_ms,
            self._ahead,
        )

    def _channel_of(self, rows: list[ScheduledRow]) -> ChannelOpened | None:
        """The channel that a step with these rows must name; None: the drafter follows none of them."""
        channel = self.link.channel if self.link is not None else None
        if channel is None or not any(row.request.bond in (Bond.ASKED, Bond.HELD) for row in rows):
            return None
        return channel

    def _number_step(self, channel: ChannelOpened | None) -> int:
        """The next step's seq: counted per channel, from 1; steps without a channel count on."""
        self._seq = self._next_seq(channel)
        if channel is not None:
            self._seq_channel = (channel.channel_id, channel.channel_epoch)
        return self._seq

    def _next_seq(self, channel: ChannelOpened | None) -> int:
        if channel is not None and (channel.channel_id, channel.channel_epoch) != self._seq_channel:
            return 1
        return self._seq + 1

    def step_sent(self, plan: StepPlan, rows: list[ScheduledRow]) -> None:
        """The target has been told of the step; now the drafter is, if it takes part."""
        self._drafts_seq = 0
        for row in rows:
            row.request.pending_drafts = row.plan.draft_len
            row.request.drafts_seq = plan.seq
        if self.link is not None and plan.channel_id:
            self.link.plan(plan)
            if any(row.draft_len for row in plan.rows):
                self._drafts_seq = plan.seq

    def step_done(self, plan: StepPlan, missed: bool) -> None:
        """The step's verdict is here. missed: the target waited for drafts in vain."""
        if self.link is not None and plan.drafts_from_seq and self._is_current(plan):
            self.link.step_done(missed)

    def step_failed(self, plan: StepPlan) -> None:
        """The target could not run the step: the drafter would wait for it."""
        if self.link is not None and self._is_current(plan):
            self.link.step_failed()

    @staticmethod
    def no_drafts(request: ActiveRequest, plan: StepPlan) -> None:
        """The request's row of the step did not run: nothing is drafted after it."""
        if request.drafts_seq == plan.seq:
            request.pending_drafts = 0

    def _is_current(self, plan: StepPlan) -> bool:
        channel = self.link.channel if self.link is not None else None
        return (
            channel is not None
            and plan.channel_id == channel.channel_id
            and plan.channel_epoch == channel.channel_epoch
        )

    # What the link tells.

    def _on_ready(self) -> None:
        self._metrics.drafter_up.set(1)
        self._on_answer()

    def _on_lost(self) -> None:
        self._metrics.drafter_up.set(0)
        self._drafts_seq = 0
        for request in self._placed.values():
            request.bond = Bond.NONE
            request.pending_drafts = 0
            request.bond_not_before = 0.0
        self._on_answer()

    def _on_admitted(self, event: Admitted) -> None:
        request = self._placed.get(event.request_id)
        if request is None or request.epoch != event.epoch or request.bond is not Bond.ASKED:
            return
        match event.status:
            case AdmitStatus.OK:
                request.bond = Bond.HELD
                if request.phase is Phase.PLACING:
                    request.cached_len = min(request.cached_len, event.cached_len)
            case AdmitStatus.NO_SEAT:
                self.unbind(request)
            case AdmitStatus.INVALID:
                request.bond = Bond.REFUSED
        self._on_answer()

    def _on_report(self, report: DraftReport) -> None:
        metrics = self._metrics
        metrics.drafter_wait.observe(report.wait_ms / 1e3)
        metrics.drafter_prefill.observe(report.prefill_ms / 1e3)
        metrics.drafter_draft.observe(report.draft_ms / 1e3)
        metrics.drafter_total.observe(report.total_ms / 1e3)
        if report.num_drafted:
            metrics.proposed_tokens.inc(report.num_drafted)
        for request_id in report.cold_request_ids:
            request = self._placed.get(request_id)
            # A report of a step before the request was last asked for says nothing new.
            if request is not None and request.bond in (Bond.ASKED, Bond.HELD) and report.seq >= request.bond_seq:
                self.unbind(request)
        self._on_answer()
