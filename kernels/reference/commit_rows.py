"""What does a verdict change, where does the host read it, and what is the drafter told of it?

The target's kernel behind the accept rule, in one go for all rows: the per-seat state moves on, the numbers that the
ring entry carries are made, and everything that the host wants to know of the step is packed in one table, so that one
copy brings it there.
"""

from __future__ import annotations

import torch

# Columns of the table that the host reads; the row's tokens follow from TOKENS on.
RAN, NUM_SAMPLED, NUM_DRAFTED, CONTEXT_LEN, MISSED, TOKENS = range(6)


def commit_rows(
    tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    seats: torch.Tensor,
    query_lens: torch.Tensor,
    known_lens: torch.Tensor,
    num_drafts: torch.Tensor,
    missed: torch.Tensor,
    context_lens: torch.Tensor,
    anchors: torch.Tensor,
    out_query_lens: torch.Tensor,
    out_num_sampled: torch.Tensor,
    out_num_rejected: torch.Tensor,
    out_anchors: torch.Tensor,
    out_table: torch.Tensor,
) -> None:
    """Commit R rows. A row runs when its seat is not negative; a prompt row (known_lens[row] >= 0) grows by its
    query_len and rejects nothing, any other by what it sampled, and rejects the rest of its real drafts.

    tokens [R, W] int64 and num_sampled [R] int32: the accept rule's verdict, of rows that do not run as well (not
    read). seats, query_lens, known_lens, num_drafts: [R] int32, missed: [1] int32: see `take_drafts`. context_lens: [S]
    int32 and anchors: [S] int64, by seat, moved on in place; a seat is named by one running row at most.
    Outputs, every element written: out_query_lens [R] int32, the tokens that count: a prompt row's chunk, or the anchor
    and the drafts that were there; out_num_sampled, out_num_rejected [R] int32, out of those; out_anchors [R] int64,
    the last token sampled, -1 for none; out_table [R, TOKENS + W] int64: ran (0 or 1), num_sampled, num_drafts, the
    context length after it, missed, then the tokens sampled, -1 behind them. Rows that do not run: 0 and -1.
    """
    runs = seats >= 0
    is_prompt = known_lens >= 0
    index = seats.clamp(min=0).to(torch.int64)
    sampled = torch.where(runs, num_sampled, 0)
    grown = torch.where(runs, torch.where(is_prompt, query_lens, sampled), 0)
    counted = torch.where(runs, torch.where(is_prompt, query_lens, num_drafts + 1), 0)
    rejected = torch.where(runs & ~is_prompt, counted - sampled, 0)
    last = tokens.gather(1, (sampled.to(torch.int64) - 1).clamp(min=0)[:, None])[:, 0]
    last = torch.where(sampled > 0, last, -1)
    moved = torch.where(sampled > 0, last - anchors[index], 0)
    # Differences are added: rows that change nothing share seat 0 with whoever sits there, without harm.
    context_lens.index_add_(0, index, grown.to(context_lens.dtype))
    anchors.index_add_(0, index, moved)
    out_query_lens.copy_(counted)
    out_num_sampled.copy_(sampled)
    out_num_rejected.copy_(rejected)
    out_anchors.copy_(last)
    out_table[:, RAN] = runs
    out_table[:, NUM_SAMPLED] = sampled
    out_table[:, NUM_DRAFTED] = torch.where(runs, num_drafts, 0)
    out_table[:, CONTEXT_LEN] = torch.where(runs, context_lens[index], 0)
    out_table[:, MISSED] = missed
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    out_table[:, TOKENS:] = torch.where(columns < sampled[:, None], tokens, -1)
