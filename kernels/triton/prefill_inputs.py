"""What does the drafter's prefill of a step run on? See `reference.prefill_inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.slot_mapping import BLOCK_TOKENS


@triton.jit(do_not_specialize=["num_rows", "num_ids", "num_out"])
def _prefill_inputs(
    ids_ptr,
    starts_ptr,
    rejected_ptr,
    anchors_ptr,
    next_tokens_ptr,
    out_ids_ptr,
    out_last_ptr,
    num_rows,
    num_ids,
    num_out,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row)
    row_end = tl.load(starts_ptr + row + 1, mask=is_row, other=num_out)
    rejected = tl.load(rejected_ptr + row, mask=is_row, other=0)
    anchor = tl.load(anchors_ptr + row, mask=is_row, other=-1)
    next_token = tl.load(next_tokens_ptr + row, mask=is_row, other=-1)
    last = tl.where(row_end > start, row_end - 1 - rejected, -1)
    following = tl.maximum(tl.where(anchor >= 0, anchor, next_token), 0)
    tl.store(out_last_ptr + row, last, mask=is_row)
    end = tl.minimum(row_end, num_out)
    real_end = tl.where(is_row, tl.minimum(end, num_ids), 0)
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        real = tokens < real_end
        # The row's very last id, and the last there is, stay: there is nothing to shift in.
        source = tl.where(tokens + 1 < real_end, tokens + 1, tokens)
        ids = tl.load(ids_ptr + source, mask=real, other=0)
        ids = tl.where(real & (tokens == last), following, ids)
        tl.store(out_ids_ptr + tokens, ids, mask=tokens < end)


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    anchors: torch.Tensor,
    next_prompt_tokens: torch.Tensor,
    out_ids: torch.Tensor,
    out_last_token_index: torch.Tensor,
) -> None:
    """See `reference.prefill_inputs.prepare_prefill_inputs`. All tensors contiguous; out_ids is not input_ids."""
    num_rows = query_start_loc.shape[0] - 1
    _prefill_inputs[(num_rows + 1,)](
        input_ids,
        query_start_loc,
        num_rejected,
        anchors,
        next_prompt_tokens,
        out_ids,
        out_last_token_index,
        num_rows,
        input_ids.shape[0],
        out_ids.shape[0],
        BLOCK=BLOCK_TOKENS,
        num_warps=1,
    )
