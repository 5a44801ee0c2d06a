"""What does a verdict change, and where does the host read it? See `reference.commit_rows`. One program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.commit_rows import CONTEXT_LEN, MISSED, NUM_DRAFTED, NUM_SAMPLED, RAN, TOKENS

_RAN = tl.constexpr(RAN)
_NUM_SAMPLED = tl.constexpr(NUM_SAMPLED)
_NUM_DRAFTED = tl.constexpr(NUM_DRAFTED)
_CONTEXT_LEN = tl.constexpr(CONTEXT_LEN)
_MISSED = tl.constexpr(MISSED)
_TOKENS = tl.constexpr(TOKENS)


@triton.jit(do_not_specialize=["tokens_stride", "table_stride"])
def _commit_rows(
    tokens_ptr,
    sampled_ptr,
    seats_ptr,
    query_lens_ptr,
    known_lens_ptr,
    num_drafts_ptr,
    missed_ptr,
    context_lens_ptr,
    anchors_ptr,
    out_query_lens_ptr,
    out_sampled_ptr,
    out_rejected_ptr,
    out_anchors_ptr,
    out_table_ptr,
    tokens_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats_ptr + row)
    query_len = tl.load(query_lens_ptr + row)
    runs = seat >= 0
    known = tl.load(known_lens_ptr + row)
    sampled = tl.where(runs, tl.load(sampled_ptr + row), 0)
    grown = tl.where(known >= 0, query_len, sampled)
    num_drafts = tl.load(num_drafts_ptr + row)
    counted = tl.where(runs, tl.where(known >= 0, query_len, num_drafts + 1), 0)
    rejected = tl.where(runs & (known < 0), counted - sampled, 0)
    context_len = tl.load(context_lens_ptr + seat, mask=runs, other=0) + tl.where(runs, grown, 0)
    last = tl.load(tokens_ptr + row * tokens_stride + sampled - 1, mask=sampled > 0, other=-1)
    tl.store(context_lens_ptr + seat, context_len, mask=runs)
    tl.store(anchors_ptr + seat, last, mask=sampled > 0)
    tl.store(out_query_lens_ptr + row, counted)
    tl.store(out_sampled_ptr + row, sampled)
    tl.store(out_rejected_ptr + row, rejected)
    tl.store(out_anchors_ptr + row, last)
    table_ptr = out_table_ptr + row * table_stride
    tl.store(table_ptr + _RAN, runs.to(tl.int64))
    tl.store(table_ptr + _NUM_SAMPLED, sampled.to(tl.int64))
    tl.store(table_ptr + _NUM_DRAFTED, tl.where(runs, num_drafts, 0).to(tl.int64))
    tl.store(table_ptr + _CONTEXT_LEN, tl.where(runs, context_len, 0).to(tl.int64))
    tl.store(table_ptr + _MISSED, tl.load(missed_ptr).to(tl.int64))
    columns = tl.arange(0, BLOCK)
    kept = tl.load(tokens_ptr + row * tokens_stride + columns, mask=columns < sampled, other=-1)
    tl.store(table_ptr + _TOKENS + columns, kept, mask=columns < WIDTH)


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
    """See `reference.commit_rows.commit_rows`. Everything contiguous but tokens and out_table, whose rows may be
    strided.
    """
    num_rows, width = tokens.shape
    if num_rows == 0:
        return
    _commit_rows[(num_rows,)](
        tokens,
        num_sampled,
        seats,
        query_lens,
        known_lens,
        num_drafts,
        missed,
        context_lens,
        anchors,
        out_query_lens,
        out_num_sampled,
        out_num_rejected,
        out_anchors,
        out_table,
        tokens.stride(0),
        out_table.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
