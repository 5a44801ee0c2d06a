"""What does the target run in a step, and how does its per-seat state move on? See `reference.target_inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.slot_mapping import BLOCK_TOKENS

_BLOCK_ROWS = 128


@triton.jit(do_not_specialize=["num_rows", "num_prompt", "draft_stride", "num_out"])
def _target_inputs(
    context_lens_ptr,
    anchors_ptr,
    seats_ptr,
    prompt_ptr,
    prompt_starts_ptr,
    drafts_ptr,
    starts_ptr,
    is_prompt_ptr,
    out_ids_ptr,
    out_positions_ptr,
    num_rows,
    num_prompt,
    draft_stride,
    num_out,
    draft_width: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row)
    end = tl.minimum(tl.load(starts_ptr + row + 1, mask=is_row, other=num_out), num_out)
    runs = is_row & (end > start)
    seat = tl.maximum(tl.load(seats_ptr + row, mask=runs, other=0), 0)
    anchor = tl.load(anchors_ptr + seat, mask=runs, other=0)
    context_len = tl.load(context_lens_ptr + seat, mask=runs, other=0)
    # A step without prompt rows hands over an empty prompt: then no row reads from it, whatever is_prompt says.
    is_prompt = (tl.load(is_prompt_ptr + row, mask=runs, other=0) != 0) & (num_prompt > 0)
    prompt_start = tl.load(prompt_starts_ptr + row, mask=runs & is_prompt, other=0)
    real_end = tl.where(is_row, end, 0)
    drafts_end = tl.where(is_prompt, 0, tl.minimum(real_end, start + 1 + draft_width))
    prompt_end = tl.where(is_prompt, real_end, 0)
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        offsets = tokens - start
        real = tokens < real_end
        drafted = (offsets > 0) & (tokens < drafts_end)
        drafts = tl.load(drafts_ptr + row.to(tl.int64) * draft_stride + offsets - 1, mask=drafted, other=0)
        where = tl.minimum(tl.maximum(prompt_start + offsets, 0), num_prompt - 1)
        prompt = tl.load(prompt_ptr + where, mask=tokens < prompt_end, other=0)
        ids = tl.where(offsets == 0, anchor, drafts)
        ids = tl.where(is_prompt, prompt, ids)
        tl.store(out_ids_ptr + tokens, tl.where(real, tl.maximum(ids, 0), 0), mask=tokens < end)
        positions = (context_len + offsets).to(tl.int64)
        tl.store(out_positions_ptr + tokens, tl.where(real, positions, 0), mask=tokens < end)


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
    """See `reference.target_inputs.prepare_target_inputs`. draft_tokens: rows may be strided."""
    num_rows = query_start_loc.shape[0] - 1
    if out_input_ids.shape[0] == 0:
        return
    _target_inputs[(num_rows + 1,)](
        context_lens,
        anchors,
        seats,
        prompt_tokens,
        prompt_start_loc,
        draft_tokens,
        query_start_loc,
        is_prompt,
        out_input_ids,
        out_positions,
        num_rows,
        prompt_tokens.shape[0],
        draft_tokens.stride(0),
        out_input_ids.shape[0],
        draft_width=draft_tokens.shape[1],
        BLOCK=BLOCK_TOKENS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _commit(
    context_lens_ptr,
    anchors_ptr,
    seats_ptr,
    query_lens_ptr,
    rejected_ptr,
    sampled_ptr,
    last_tokens_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    seats = tl.load(seats_ptr + rows, mask=mask, other=-1)
    query_lens = tl.load(query_lens_ptr + rows, mask=mask, other=0)
    runs = mask & (seats >= 0) & (query_lens > 0)
    rejected = tl.load(rejected_ptr + rows, mask=runs, other=0)
    # Seats of running rows are distinct, so no two lanes meet.
    context_lens = tl.load(context_lens_ptr + seats, mask=runs, other=0)
    tl.store(context_lens_ptr + seats, context_lens + query_lens - rejected, mask=runs)
    sampled = runs & (tl.load(sampled_ptr + rows, mask=runs, other=0) > 0)
    tl.store(anchors_ptr + seats, tl.load(last_tokens_ptr + rows, mask=sampled, other=0), mask=sampled)


def commit_verdict(
    context_lens: torch.Tensor,
    anchors: torch.Tensor,
    seats: torch.Tensor,
    query_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    num_sampled: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """See `reference.target_inputs.commit_verdict`. All tensors contiguous."""
    num_rows = seats.shape[0]
    if num_rows == 0:
        return
    _commit[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        context_lens,
        anchors,
        seats,
        query_lens,
        num_rejected,
        num_sampled,
        last_tokens,
        num_rows,
        BLOCK=_BLOCK_ROWS,
        num_warps=1,
    )
