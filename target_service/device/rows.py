"""Which rows of a step are launched, and with how many blocks, when the host knows only bounds?

A row's context length is at most `Session.launched_len`; blocks are reserved for that. Whatever of a row lies past its
`limit` (the blocks it got, or its request's length) does not count on the device, so a bound that is too high costs
drafts at worst. Where even the least does not fit, the steps under way are awaited first: from what they were, not from
what they might have become, a row starves or does not, as with host execution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request_blocks import RequestBlocks
from target_service.flights import FlightRow
from target_service.messages import RowRequest, RowStatus, StepRequest
from target_service.sessions import Session, Sessions, StepKey


def wants_drafts(row: RowRequest, session: Session | None, step_key: StepKey) -> bool:
    """Whether the drafts made after step `step_key` would follow the row's anchor."""
    return session is not None and row.verify_len > 0 and session.last_step == step_key


def plan_rows(
    step: StepRequest,
    placements: Sequence[Session | None],
    sessions: Sessions,
    drafts_wanted: bool,
    settle: Callable[[], None],
) -> tuple[FlightRow, ...]:
    """Decide what becomes of each row, and get its blocks. Drafts, its own or others', give way before a row starves.

    drafts_wanted: decode rows run with as many tokens as planned; False: there can be no drafts, they run their anchor
    alone. settle: completes the steps under way, all of them; afterwards lengths are exact.
    """
    blocks = sessions.blocks
    for row, session in zip(step.rows, placements, strict=True):
        if session is not None and not session.started:
            sessions.start(session, row.context_len)
    lengths = _lengths(step, placements, drafts_wanted)
    starved = _reserve_least(lengths, placements, blocks)
    if starved and any(session is not None and session.rows_ahead for session in placements):
        settle()
        # A step that failed took its requests along: they have no seat any more to get blocks for.
        placements = [session if session is not None and session.resident else None for session in placements]
        lengths = _lengths(step, placements, drafts_wanted)
        starved = _reserve_least(lengths, placements, blocks)
    rows: list[FlightRow] = []
    for row, session, length in zip(step.rows, placements, lengths, strict=True):
        if session is None:
            rows.append(FlightRow(row, None, RowStatus.UNKNOWN))
        elif length is None:
            rows.append(FlightRow(row, session, RowStatus.SKIPPED))
        elif session.seat in starved:
            rows.append(FlightRow(row, session, RowStatus.STARVED))
        elif session.in_prompt:
            rows.append(FlightRow(row, session, RowStatus.OK, row.query_len, 0, 1 if row.samples else 0, True))
        else:
            query_len = row.query_len if drafts_wanted else 1
            blocks.reserve(session.seat, length[1])
            limit = min(blocks.capacity(session.seat), session.max_total_len - 1)
            rows.append(FlightRow(row, session, RowStatus.OK, query_len, limit, query_len))
    return tuple(rows)


def look_ahead(rows: Sequence[FlightRow], blocks: RequestBlocks, max_draft_len: int, max_model_len: int) -> None:
    """Under `reuse` the drafter writes its drafts' KV by our tables: give each row the blocks for them where there are
    any left. Without, the row's drafts end where its blocks do.
    """
    for row in rows:
        session, draft_len = row.session, min(row.request.draft_len, max_draft_len)
        if session is not None and row.query_len and draft_len:
            length = session.launched_len + row.query_len + draft_len
            blocks.reserve(session.seat, min(length, max_model_len))


# Of a row that is to run: the tokens it must have blocks for, and those it would like to.
_Lengths = list[tuple[int, int] | None]


def _lengths(step: StepRequest, placements: Sequence[Session | None], drafts_wanted: bool) -> _Lengths:
    """Of each row; None for those that have nothing to run."""
    lengths: _Lengths = []
    for row, session in zip(step.rows, placements, strict=True):
        if session is None or session.overtaken(row):
            lengths.append(None)
            continue
        stands = session.launched_len
        if stands < session.num_admitted:
            lengths.append((stands + row.query_len, stands + row.query_len))
        else:
            most, query_len = session.max_total_len - 1, row.query_len if drafts_wanted else 1
            lengths.append((min(stands + 1, most), min(stands + query_len, most)))
    return lengths


def _reserve_least(lengths: _Lengths, placements: Sequence[Session | None], blocks: RequestBlocks) -> set[int]:
    """Get every row the blocks without which it cannot run: for its chunk, or for its anchor. Returns the seats that
    got none.
    """
    short = {
        session.seat
        for session, length in zip(placements, lengths, strict=True)
        if session is not None and length is not None and not blocks.reserve(session.seat, length[0])
    }
    if not short:
        return short
    # Blocks that were for drafts of earlier steps. Steps under way write below the bound, so nothing of theirs goes.
    least = {
        session.seat: length[0]
        for session, length in zip(placements, lengths, strict=True)
        if session is not None and length is not None
    }
    for seat, length in least.items():
        blocks.trim(seat, length)
    return {seat for seat in least if seat in short and not blocks.reserve(seat, least[seat])}
