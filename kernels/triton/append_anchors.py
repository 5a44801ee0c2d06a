"""What does a draft model's prefill of a step run on? See `reference.append_anchors`.

One program per row, and one more that fills what lies behind the last one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.take_entry import TakenRows
from kernels.triton.slot_mapping import BLOCK_TOKENS


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def _append(
    starts_ptr,
    seats_ptr,
    seq_lens_ptr,
    rejected_ptr,
    anchors_ptr,
    anchor_positions_ptr,
    num_drafts_ptr,
    ids_ptr,
    positions_ptr,
    step_positions_ptr,
    step_seq_lens_ptr,
    out_starts_ptr,
    out_seq_lens_ptr,
    out_ids_ptr,
    out_positions_ptr,
    out_last_ptr,
    num_rows,
    num_out,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row)
    row_end = tl.load(starts_ptr + row + 1, mask=is_row, other=0)
    seat = tl.load(seats_ptr + row, mask=is_row, other=-1)
    runs = is_row & (seat >= 0)
    anchor = tl.load(anchors_ptr + row, mask=is_row, other=-1)
    anchor_position = tl.load(anchor_positions_ptr + row, mask=is_row, other=0)
    rejected = tl.load(rejected_ptr + row, mask=is_row, other=0)
    valid = tl.where(runs, row_end - start - rejected, 0)
    anchored = runs & (anchor >= 0)
    out_start = start + row
    tl.store(out_starts_ptr + row, out_start)
    seq_len = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
    tl.store(out_seq_lens_ptr + row, tl.where(runs, seq_len + 1, 0), mask=is_row)
    tl.store(out_last_ptr + row, out_start + tl.where(anchored, valid, 0), mask=is_row)
    tl.store(step_positions_ptr + row, tl.where(runs, anchor_position, 0), mask=is_row)
    drafts = tl.load(num_drafts_ptr + row, mask=is_row, other=0)
    tl.store(step_seq_lens_ptr + row, tl.where(drafts > 0, anchor_position + 1, 0).to(tl.int32), mask=is_row)
    end = tl.where(is_row, row_end + row + 1, num_out)
    for first in range(out_start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        offsets = tokens - out_start
        kept = (tokens < end) & (offsets < valid)
        ids = tl.load(ids_ptr + start + offsets, mask=kept, other=0)
        positions = tl.load(positions_ptr + start + offsets, mask=kept, other=-1)
        is_anchor = anchored & (offsets == valid)
        tl.store(out_ids_ptr + tokens, tl.where(is_anchor, anchor, ids), mask=tokens < end)
        tl.store(out_positions_ptr + tokens, tl.where(is_anchor, anchor_position, positions), mask=tokens < end)


def append_anchors(
    taken: TakenRows,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_last_index: torch.Tensor,
) -> None:
    """See `reference.append_anchors.append_anchors`. All tensors contiguous; outputs share no memory with inputs."""
    num_rows = taken.seats.shape[0]
    _append[(num_rows + 1,)](
        taken.query_start_loc,
        taken.seats,
        taken.seq_lens,
        taken.num_rejected,
        taken.anchors,
        taken.anchor_positions,
        taken.num_drafts,
        taken.input_ids,
        taken.positions,
        taken.step_positions,
        taken.step_seq_lens,
        out_query_start_loc,
        out_seq_lens,
        out_ids,
        out_positions,
        out_last_index,
        num_rows,
        out_ids.shape[0],
        BLOCK=BLOCK_TOKENS,
        num_warps=1,
    )
