"""Rotary embedding of a step's queries and keys and the write of its KV, in one launch. See
`reference.rope_kv_write`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.kv_write import packed_heads
from kernels.triton.overlap import gdc_launch_dependents, gdc_wait, overlap_options
from kernels.triton.rope import BLOCK_HEADS, rotate_heads


@triton.jit
def _rope_kv_write(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    out_q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    halves = tl.arange(0, BLOCK_HALF)
    slot = tl.load(slots_ptr + token)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    cos = tl.load(cos_ptr + token * angle_stride + halves, mask=halves < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + halves, mask=halves < HALF, other=0.0).to(tl.float32)
    q_parts: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    if part < q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        first, second, offsets, mask = rotate_heads(q_ptr, q_stride, token, heads, num_heads, cos, sin, halves, HALF)
        out_ptr = out_q_ptr + token * (num_heads * 2 * HALF) + offsets
        tl.store(out_ptr, first.to(out_q_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + HALF, second.to(out_q_ptr.dtype.element_ty), mask=mask)
    else:
        if slot >= 0:
            heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
            first, second, offsets, mask = rotate_heads(
                k_ptr, k_stride, token, heads, num_kv_heads, cos, sin, halves, HALF
            )
            where = slot * (num_kv_heads * 2 * HALF) + offsets
            # Rounded as the rotated key is, before the cache's own dtype.
            first = first.to(k_ptr.dtype.element_ty).to(tl.float32)
            second = second.to(k_ptr.dtype.element_ty).to(tl.float32)
            tl.store(k_cache_ptr + where, first.to(k_cache_ptr.dtype.element_ty), mask=mask)
            tl.store(k_cache_ptr + where + HALF, second.to(k_cache_ptr.dtype.element_ty), mask=mask)
            v_first = tl.load(v_ptr + token * v_stride + offsets, mask=mask, other=0.0).to(tl.float32)
            v_second = tl.load(v_ptr + token * v_stride + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
            tl.store(v_cache_ptr + where, v_first.to(v_cache_ptr.dtype.element_ty), mask=mask)
            tl.store(v_cache_ptr + where + HALF, v_second.to(v_cache_ptr.dtype.element_ty), mask=mask)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """See `reference.rope_kv_write.rope_kv_write`, float32 inside. Views into a fused projection are taken as they are;
    the caches are contiguous.
    """
    q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], head_dim // 2
    out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out_q
    parts = triton.cdiv(num_heads, BLOCK_HEADS) + triton.cdiv(num_kv_heads, BLOCK_HEADS)
    _rope_kv_write[(num_tokens, parts)](
        q,
        k,
        v,
        cos,
        sin,
        slots,
        out_q,
        k_cache,
        v_cache,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        HEADS=BLOCK_HEADS,
        num_warps=2,
        **overlap_options(q.device),
    )
    return out_q
