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
    starved = _reserve_least(step, placements, blocks)
    if starved and any(session is not None and session.rows_ahead for session in placements):
        settle()
        starved = _reserve_least(step, placements, blocks)
    rows: list[FlightRow] = []
    for row, session in zip(step.rows, placements, strict=True):
        if session is None:
            rows.append(FlightRow(row, None, RowStatus.UNKNOWN))
        elif session.overtaken(row):
            rows.append(FlightRow(row, session, RowStatus.SKIPPED))
        elif session.seat in starved:
            rows.append(FlightRow(row, session, RowStatus.STARVED))
        elif session.in_prompt:
            num_logits = 1 if row.samples else 0
            rows.append(FlightRow(row, session, RowStatus.OK, row.query_len, 0, num_logits, is_prompt=True))
        else:
            query_len = row.query_len if drafts_wanted else 1
            most = session.max_total_len - 1
            blocks.reserve(session.seat, min(session.launched_len + query_len, most))
            limit = min(blocks.capacity(session.seat), most)
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


def _reserve_least(step: StepRequest, placements: Sequence[Session | None], blocks: RequestBlocks) -> set[int]:
    """Get every row the blocks without which it cannot run: for its chunk, or for its anchor. Returns the seats that
    got none.
    """
    least: dict[int, int] = {}
    for row, session in zip(step.rows, placements, strict=True):
        if session is None or session.overtaken(row):
            continue
        if session.in_prompt:
            least[session.seat] = session.launched_len + row.query_len
        else:
            least[session.seat] = min(session.launched_len + 1, session.max_total_len - 1)
    short = {seat for seat, length in least.items() if not blocks.reserve(seat, length)}
    if not short:
        return short
    # Blocks that were for drafts of earlier steps. Steps under way write below the bound, so nothing of theirs goes.
    for seat, length in least.items():
        blocks.trim(seat, length)
    return {seat for seat in least if seat in short and not blocks.reserve(seat, least[seat])}
