"""How do a step's keys and values get into the paged cache? See `reference.kv_write`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_stride,
    v_stride,
    num_elements,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = elements < num_elements
        k = tl.load(k_ptr + token * k_stride + elements, mask=mask).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride + elements, mask=mask).to(tl.float32)
        where = slot * num_elements + elements
        tl.store(k_cache_ptr + where, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_cache_ptr + where, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def packed_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] itself where a token's heads are contiguous, as in a view into a fused projection; else a copy.

    The kernels take one stride, that of the tokens, and would read other numbers without a word.
    """
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def write_kv(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """See `reference.kv_write.write_kv`. Views into a fused projection are taken as they are; caches are contiguous."""
    k, v = packed_heads(k), packed_heads(v)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    num_elements = num_kv_heads * head_dim
    block = min(1024, triton.next_power_of_2(num_elements))
    _write[(num_tokens, triton.cdiv(num_elements, block))](
        k,
        v,
        slots,
        k_cache,
        v_cache,
        k.stride(0),
        v.stride(0),
        num_elements,
        BLOCK=block,
        num_warps=4,
    )
