"""What does the drafter do for one plan?

Waits for the ring entry, follows it, drafts, publishes the reply. A step whose entry did not come in time is answered
with an empty reply, so that the target does not wait for it, and is followed later if its entry is still in the ring:
then the draft KV has no hole.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from drafter_service.channels import ChannelLink
from drafter_service.entries import check_entry, copy_entry, draft_rows
from drafter_service.messages import DraftTimes, StepReport, StepRequest
from drafter_service.residency import Residents
from drafter_service.speculator import DraftBatch, DraftProposal, Speculator, empty_proposal
from engine.channel.interface import RingEntry
from engine.errors import ChannelError

_log = logging.getLogger(__name__)

# Plans of a channel that wait behind a step, beyond those sent ahead, when drafts for it are of no use any more: the
# target takes the drafts of step n in step n + 1, so it has gone past them once, in lockstep, plan n + 2 is here.
USELESS_BEHIND = 2


@dataclass(slots=True)
class PendingStep:
    """A plan that is being waited for. started: when it was first looked at; end: when the wait is over."""

    plan: StepRequest
    started: float
    end: float
    hurried: bool = False


class StepRunner:
    """Runs plans. Used by the device thread only.

    max_wait_s: the longest wait for an entry while nothing else is known of the channel; once a plan is there that was
    sent after the step's verdict (the next one in lockstep), so that the entry has been published or never will be,
    the plan's own deadline counts.
    """

    def __init__(self, speculator: Speculator, residents: Residents, max_wait_s: float) -> None:
        self._speculator = speculator
        self._residents = residents
        self._max_wait_s = max_wait_s
        needs = speculator.needs
        self._with_hidden = bool(needs.hidden_layers)
        self._with_layout = needs.metadata_source == "reuse"
        self._max_draft_len = needs.max_draft_len

    def begin(self, plan: StepRequest) -> PendingStep:
        """Start to wait for a plan's entry."""
        now = time.monotonic()
        return PendingStep(plan, now, now + self._max_wait_s)

    def try_step(self, link: ChannelLink, pending: PendingStep, later_plans: int, slice_s: float) -> StepReport | None:
        """Run the step if its entry comes within slice_s. None: not yet, ask again. later_plans: of the same channel,
        that wait behind it.
        """
        plan, channel = pending.plan, link.attached.host_channel
        now = time.monotonic()
        later_plans = max(0, later_plans - plan.ahead)
        if later_plans and not pending.hurried:
            pending.hurried = True
            pending.end = min(pending.end, now + plan.deadline_ms / 1e3)
        longest = min(slice_s, max(pending.end - now, 0.0))
        entry = channel.take_entry(plan.seq, longest)
        waited = time.monotonic()
        wait_ms = (waited - pending.started) * 1e3
        if entry is None:
            # Back before its time was up: the entry was overwritten or never made, or the channel is gone for good.
            if waited - now >= longest and waited < pending.end and channel.peer_alive():
                return None
            return self._miss(link, plan, wait_ms)
        self._catch_up(link)
        proposal = self._follow(link, plan, entry, drafting=later_plans < USELESS_BEHIND)
        if proposal is None or not self._publish(link, plan, proposal):
            return self._miss(link, plan, wait_ms)
        return StepReport(
            seq=plan.seq,
            channel_id=plan.channel_id,
            cold_request_ids=self._residents.cold(plan),
            num_drafted=proposal.num_drafted,
            metadata_builds=proposal.metadata_builds,
            metadata_launches=proposal.metadata_launches,
            times=DraftTimes(
                wait_ms, proposal.prefill_ms, proposal.draft_ms, (time.monotonic() - pending.started) * 1e3
            ),
        )

    def _miss(self, link: ChannelLink, plan: StepRequest, wait_ms: float) -> StepReport:
        link.missed.append(plan)
        self._publish(link, plan, empty_proposal(len(plan.rows)))
        return StepReport(
            seq=plan.seq,
            channel_id=plan.channel_id,
            missed=True,
            cold_request_ids=self._residents.cold(plan),
            times=DraftTimes(wait_ms=wait_ms, total_ms=wait_ms),
        )

    def _catch_up(self, link: ChannelLink) -> None:
        """Follow earlier steps whose entry came too late, without drafting."""
        while link.missed:
            plan = link.missed.popleft()
            entry = link.attached.host_channel.take_entry(plan.seq, 0.0)
            if entry is not None:
                self._follow(link, plan, entry, drafting=False)

    def _follow(self, link: ChannelLink, plan: StepRequest, shared: RingEntry, drafting: bool) -> DraftProposal | None:
        """Follow one entry. None: it was overwritten while it was read, or makes no sense."""
        channel = link.attached.host_channel
        spec = channel.spec
        entry = copy_entry(shared, self._with_hidden, self._with_layout)
        if not channel.entry_intact(plan.seq):
            return None
        try:
            check_entry(entry, spec, len(plan.rows))
        except ChannelError as error:
            _log.warning("step %d of channel %s not followed: %s", plan.seq, plan.channel_id, error)
            return None
        residents = [self._residents.find(row.request_id, row.epoch, plan.channel_id) for row in plan.rows]
        rows = draft_rows(
            entry,
            plan.rows,
            residents,
            min(self._max_draft_len, spec.max_draft_len) if drafting else 0,
            link.attached.max_model_len,
        )
        ids = entry.input_ids.tolist()
        for row in rows:
            accepted = ids[row.query_start : row.query_start + row.query_len - row.num_rejected]
            row.resident.observe(row.context_len, accepted, row.anchor)
        return self._speculator.propose(DraftBatch(entry, rows, spec.vocab_size, spec.draft_probs))

    def _publish(self, link: ChannelLink, plan: StepRequest, proposal: DraftProposal) -> bool:
        try:
            parts = (proposal.tokens, proposal.probs, proposal.has_probs)
            tokens, probs, has_probs = (None if part is None else part.cpu() for part in parts)
            assert tokens is not None
            link.attached.host_channel.publish_reply(plan.seq, tokens, probs, has_probs)
        except ChannelError:  # the channel is closed: whoever opens the next one starts afresh
            return False
        return True
