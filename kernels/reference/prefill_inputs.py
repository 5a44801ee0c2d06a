"""What does the drafter's prefill of a step run on?

Ids shifted left by one inside each row, so that the row for position p holds the target's hidden state of p and token
p + 1 (EAGLE, Li et al. 2024). Host twin: `layout.make_prefill_inputs`.
"""

from __future__ import annotations

import torch

from kernels.reference.slot_mapping import token_rows


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    anchors: torch.Tensor,
    next_prompt_tokens: torch.Tensor,
    out_ids: torch.Tensor,
    out_last_token_index: torch.Tensor,
) -> None:
    """Shift each row's ids left by one and put the token that follows the row at its last valid index.

    last_token_index = start + query_len - num_rejected - 1. There goes the anchor, or the next prompt token where the
    anchor is -1 (mid-prefill), or 0 where there is neither. Behind it (rejected tokens) ids are shifted too, and the
    row's very last one keeps its own id: their results are never read. Rows with query_len 0: last_token_index -1.
    Ids past the real tokens: 0.

    input_ids: [>= T]; query_start_loc: [R + 1] int32; num_rejected: [R] int32; anchors, next_prompt_tokens: [R] int64;
    out_ids: [Tp] int64; out_last_token_index: [R] int32. Every element of both outputs is written.
    """
    num_rows = query_start_loc.shape[0] - 1
    out_ids.zero_()
    if num_rows == 0:
        return
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    runs = ends > starts
    last = torch.where(runs, ends - 1 - num_rejected, -1)
    out_last_token_index.copy_(last)

    num_tokens = min(input_ids.shape[0], out_ids.shape[0])
    if num_tokens == 0:
        return
    rows = token_rows(query_start_loc, num_tokens)
    tokens = torch.arange(num_tokens, device=out_ids.device)
    following = torch.where(anchors >= 0, anchors, next_prompt_tokens).clamp(min=0)
    is_row_end = tokens + 1 == ends[rows]
    shifted = torch.where(is_row_end, input_ids[:num_tokens], input_ids[(tokens + 1).clamp(max=num_tokens - 1)])
    ids = torch.where(tokens == last[rows], following[rows], shifted)
    out_ids[:num_tokens] = torch.where(tokens < query_start_loc[-1], ids, 0)
