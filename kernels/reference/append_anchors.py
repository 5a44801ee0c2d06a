"""What does a draft model's prefill of a step run on?

The step's own tokens that were accepted, where they stand, and behind them the anchor: one token more in each row. A
draft model reads tokens alone, so nothing is shifted; running the accepted tokens again closes whatever draft steps
left open.
"""

from __future__ import annotations

import torch

from kernels.reference.slot_mapping import token_rows
from kernels.reference.take_entry import TakenRows


def append_anchors(
    taken: TakenRows,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_last_index: torch.Tensor,
) -> None:
    """Lay the rows of `taken` (Rp rows, Tp tokens) out with one token more each, and stand the draft steps on anchors.

    A running row's query_len - num_rejected first tokens keep id and position; the anchor, if it has one, follows at
    the next position. Every other token of its query_len + 1 has id 0 and position -1 (no slot), as have all tokens of
    rows that do not run, and those behind the last row. Seats start at position 0.

    out_query_start_loc: [Rp + 1] int32; out_seq_lens: [Rp] int32, one more than the row's, 0 where it does not run;
    out_ids, out_positions: [Tp + Rp] int64; out_last_index: [Rp] int32, of the anchor, or of the row's first token
    where it has none. taken.step_positions becomes the anchor's position, taken.step_seq_lens that plus one, 0 for
    rows that draft nothing.
    """
    num_rows, num_tokens = taken.seats.shape[0], out_ids.shape[0]
    device = out_ids.device
    index = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    out_query_start_loc.copy_(taken.query_start_loc + index)
    out_ids.zero_()
    out_positions.fill_(-1)
    if num_rows == 0:
        return
    runs, has_anchor = taken.seats >= 0, taken.anchors >= 0
    starts = taken.query_start_loc[:-1].to(torch.int64)
    query_lens = taken.query_start_loc[1:].to(torch.int64) - starts
    valid = torch.where(runs, query_lens - taken.num_rejected, 0)
    out_seq_lens.copy_(torch.where(runs, taken.seq_lens + 1, 0))
    out_last_index.copy_(out_query_start_loc[:-1] + torch.where(runs & has_anchor, valid, 0))
    taken.step_positions.copy_(torch.where(runs, taken.anchor_positions, 0))
    taken.step_seq_lens.copy_(torch.where(taken.num_drafts > 0, taken.anchor_positions + 1, 0))

    tokens = torch.arange(num_tokens, device=device)
    rows = token_rows(out_query_start_loc, num_tokens)
    offsets = tokens - starts[rows] - rows
    inside = (tokens < out_query_start_loc[-1]) & runs[rows]
    kept = inside & (offsets < valid[rows])
    source = (tokens - rows).clamp(0, max(taken.input_ids.shape[0] - 1, 0))
    if taken.input_ids.shape[0]:
        out_ids.copy_(torch.where(kept, taken.input_ids[source], 0))
        out_positions.copy_(torch.where(kept, taken.positions[source], -1))
    is_anchor = inside & has_anchor[rows] & (offsets == valid[rows])
    out_ids.copy_(torch.where(is_anchor, taken.anchors[rows], out_ids))
    out_positions.copy_(torch.where(is_anchor, taken.anchor_positions[rows], out_positions))
