"""What does the target run in a step, and how does its per-seat state move on after the verdict?

Positions come from *device* state (context_lens by seat), never from the host's idea of a row's length, which may lag
behind rejections. Host twins: `layout.make_target_inputs`, `layout.commit_verdict`.
"""

from __future__ import annotations

import torch

from kernels.reference.slot_mapping import token_rows


def prepare_target_inputs(
    context_lens: torch.Tensor,
    anchors: torch.Tensor,
    seats: torch.Tensor,
    prompt_tokens: torch.Tensor,
    prompt_start_loc: torch.Tensor,
    draft_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    is_prompt: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
) -> None:
    """Input ids per row: its prompt chunk, or [anchor, d1 .. dn]; positions context_len + j.

    An absent draft (-1, or past draft_tokens' width) runs as id 0: its row of logits is never read. Past the real
    tokens: id 0, position 0.

    context_lens: [S] int32 and anchors: [S] int64, per seat; seats: [R] int32 (not read for rows of length 0);
    prompt_tokens: [Tprompt] int64, the chunks of the prompt rows; prompt_start_loc: [R] or [R + 1], where each prompt
    row's chunk begins in it; draft_tokens: [R, K] int64; query_start_loc: [R + 1] int32; is_prompt: [R] bool;
    out_input_ids, out_positions: [Tp] int64, every element is written.
    """
    out_input_ids.zero_()
    out_positions.zero_()
    num_tokens = out_input_ids.shape[0]
    if num_tokens == 0 or query_start_loc.shape[0] < 2:
        return
    rows = token_rows(query_start_loc, num_tokens)
    tokens = torch.arange(num_tokens, device=out_input_ids.device)
    real = tokens < query_start_loc[-1]
    offsets = torch.where(real, tokens - query_start_loc[rows], 0)
    row_seats = seats.to(torch.int64).clamp(min=0)[rows]

    ids = anchors[row_seats]
    width = draft_tokens.shape[1]
    if width:
        drafts = draft_tokens[rows, (offsets - 1).clamp(0, width - 1)]
        ids = torch.where(offsets == 0, ids, torch.where(offsets <= width, drafts, 0))
    else:
        ids = torch.where(offsets == 0, ids, 0)
    if prompt_tokens.shape[0]:
        where = (prompt_start_loc[rows] + offsets).clamp(0, prompt_tokens.shape[0] - 1)
        ids = torch.where(is_prompt[rows], prompt_tokens[where], ids)
    out_input_ids.copy_(torch.where(real, ids.clamp(min=0), 0))
    out_positions.copy_(torch.where(real, context_lens[row_seats] + offsets, 0))


def commit_verdict(
    context_lens: torch.Tensor,
    anchors: torch.Tensor,
    seats: torch.Tensor,
    query_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    num_sampled: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """context_len += query_len - num_rejected; anchor = last sampled token, where one was sampled. In place, by seat.

    Rows with seat < 0 or query_len 0 change nothing. A seat is named by one running row at most.

    context_lens: [S] int32; anchors: [S] int64; seats, query_lens, num_rejected, num_sampled: [R] int32; last_tokens:
    [R] int64.
    """
    runs = (seats >= 0) & (query_lens > 0)
    index = seats.to(torch.int64).clamp(min=0)
    grown = torch.where(runs, query_lens - num_rejected, 0)
    # Integer differences are added rather than values stored: a row that does not run then shares seat 0 without harm.
    moved = torch.where(runs & (num_sampled > 0), last_tokens - anchors[index], 0)
    context_lens.index_add_(0, index, grown.to(context_lens.dtype))
    anchors.index_add_(0, index, moved.to(anchors.dtype))
