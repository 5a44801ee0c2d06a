"""Which drafts does a step verify?

The reply entry of an earlier step holds one row of drafts per row of *that* step's plan. A draft is used only when it
follows the request's present anchor: the same placement, and no step of the request in between. Everything else is
absent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.channel.interface import ReplyEntry
from target_service.channels import OpenChannel
from target_service.messages import RowRequest, StepRequest
from target_service.sessions import Session, StepKey


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step's R rows, in the plan's order.

    tokens: each row's real drafts, at most what it may verify. reply_rows: each row's row in the reply, -1: none.
    missed: drafts were wanted and no reply came in time.
    """

    tokens: tuple[tuple[int, ...], ...]
    reply_rows: tuple[int, ...]
    reply: ReplyEntry | None
    missed: bool

    def probs_of(
        self, rows: Sequence[int], max_drafts: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Draft probabilities [S, max_drafts, V] and has_probs [S] of the plan rows named, on `device`; (None, None)
        when no row has any. A row whose numbers cannot be probabilities has none.
        """
        reply = self.reply
        if reply is None or reply.probs is None or reply.has_probs is None or max_drafts == 0:
            return None, None
        sources = torch.tensor([self.reply_rows[row] for row in rows], dtype=torch.int64)
        has_probs = reply.has_probs[sources.clamp(min=0)] & (sources >= 0)
        if not bool(has_probs.any()):
            return None, None
        probs = reply.probs[sources.clamp(min=0), :max_drafts]  # a copy: what is looked at is what is used
        # A negative or NaN "probability" could bring up a token that the target's own filters leave out.
        lowest, highest = probs.flatten(1).aminmax(dim=1)
        has_probs &= (lowest >= 0) & (highest < math.inf)
        return (probs.to(device), has_probs.to(device)) if bool(has_probs.any()) else (None, None)


def no_drafts(num_rows: int, missed: bool = False) -> StepDrafts:
    """A step without drafts."""
    return StepDrafts(((),) * num_rows, (-1,) * num_rows, None, missed)


def take_drafts(
    step: StepRequest,
    sessions: Sequence[Session | None],
    channel: OpenChannel | None,
    vocab_size: int,
    deadline_s: float,
) -> StepDrafts:
    """Wait for the reply to step `drafts_from_seq` and sort its drafts to this step's rows. Never raises for a bad
    reply: what the drafter writes is outside input, and losing it costs speed only.
    """
    num_rows = len(step.rows)
    step_key = (step.channel_id, step.channel_epoch, step.drafts_from_seq)
    usable = [_num_usable(row, session, step_key) for row, session in zip(step.rows, sessions, strict=True)]
    if step.drafts_from_seq == 0 or not any(usable):
        return no_drafts(num_rows)
    places = None if channel is None else channel.rows_of(step.drafts_from_seq)
    if channel is None or places is None:
        return no_drafts(num_rows, missed=True)
    # Plans sent before the gateway can have heard of a reply that did not come: one deadline is enough for all of them.
    waits = step.seq - channel.missed_at > step.ahead
    reply = channel.host_end.take_reply(step.drafts_from_seq, deadline_s if waits else 0.0)
    if reply is None and waits:
        channel.missed_at = step.seq
    if reply is None or reply.num_rows != len(places):
        return no_drafts(num_rows, missed=True)
    table = reply.tokens.tolist()
    tokens: list[tuple[int, ...]] = []
    reply_rows: list[int] = []
    for row, max_drafts in zip(step.rows, usable, strict=True):
        place = places.get((row.request_id, row.epoch), -1) if max_drafts else -1
        tokens.append(_real_drafts(table[place], max_drafts, vocab_size) if place >= 0 else ())
        reply_rows.append(place)
    return StepDrafts(tuple(tokens), tuple(reply_rows), reply, missed=False)


def _num_usable(row: RowRequest, session: Session | None, step_key: StepKey) -> int:
    """How many drafts the row may verify that were made after step `step_key`: none unless they follow its anchor."""
    if session is None or session.last_step != step_key:
        return 0
    return min(row.verify_len, session.max_drafts)


def _real_drafts(row: Sequence[int], max_drafts: int, vocab_size: int) -> tuple[int, ...]:
    drafts: list[int] = []
    for token in row[:max_drafts]:
        if not 0 <= token < vocab_size:
            break
        drafts.append(token)
    return tuple(drafts)
