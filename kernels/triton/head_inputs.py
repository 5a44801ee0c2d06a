"""What does the layer of an EAGLE-3 head read? See `reference.head_inputs`. One launch in the place of four."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _head_inputs(
    ids_ptr,
    embed_ptr,
    hidden_ptr,
    embed_norm_ptr,
    hidden_norm_ptr,
    out_ptr,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    is_hidden = tl.program_id(1) == 1
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    token_id = tl.load(ids_ptr + token)
    row_ptr = embed_ptr + token_id * SIZE
    weight_ptr = embed_norm_ptr
    if is_hidden:
        row_ptr = hidden_ptr + token * hidden_stride
        weight_ptr = hidden_norm_ptr
    x = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    # Rounded before it is weighed, as the norm on its own does.
    normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    out_row_ptr = out_ptr + (2 * token + is_hidden.to(tl.int64)) * SIZE
    tl.store(out_row_ptr + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def head_inputs(
    token_ids: torch.Tensor,
    embed_weight: torch.Tensor,
    hidden: torch.Tensor,
    embed_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `reference.head_inputs.head_inputs`. Everything contiguous but for hidden's rows."""
    num_tokens, size = hidden.shape
    out = torch.empty((num_tokens, 2 * size), dtype=hidden.dtype, device=hidden.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(size)
    _head_inputs[(num_tokens, 2)](
        token_ids,
        embed_weight,
        hidden,
        embed_norm,
        hidden_norm,
        out,
        hidden.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
