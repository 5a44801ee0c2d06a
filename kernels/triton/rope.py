"""Rotary position embedding, the half-rotation form. See `reference.rope`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.kv_write import packed_heads

# Heads that one program rotates: a decode token spreads over several programs, and a prompt's are not too small.
BLOCK_HEADS = 4


@triton.jit
def rotate_heads(x_ptr, stride, token, heads, num_heads, cos, sin, halves, HALF: tl.constexpr):
    """The rotated halves, float32 [heads, half] each, of some heads of a token. cos, sin: float32 [half]. Returns
    (first, second, offsets of the first half within the token, mask).
    """
    mask = (heads < num_heads)[:, None] & (halves < HALF)[None, :]
    offsets = heads[:, None] * (2 * HALF) + halves[None, :]
    first = tl.load(x_ptr + token * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + token * stride + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    return first * cos - second * sin, second * cos + first * sin, offsets, mask


@triton.jit
def _rope(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    out_q_ptr,
    out_k_ptr,
    q_stride,
    k_stride,
    angle_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    halves = tl.arange(0, BLOCK_HALF)
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
        heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        first, second, offsets, mask = rotate_heads(k_ptr, k_stride, token, heads, num_kv_heads, cos, sin, halves, HALF)
        out_ptr = out_k_ptr + token * (num_kv_heads * 2 * HALF) + offsets
        tl.store(out_ptr, first.to(out_k_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + HALF, second.to(out_k_ptr.dtype.element_ty), mask=mask)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rope.apply_rope`, float32 inside. Views into a fused projection are taken as they are."""
    q, k = packed_heads(q), packed_heads(k)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], head_dim // 2
    out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return out_q, out_k
    parts = triton.cdiv(num_heads, BLOCK_HEADS) + triton.cdiv(num_kv_heads, BLOCK_HEADS)
    _rope[(num_tokens, parts)](
        q,
        k,
        cos,
        sin,
        out_q,
        out_k,
        q.stride(0),
        k.stride(0),
        cos.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        HEADS=BLOCK_HEADS,
        num_warps=2,
    )
    return out_q, out_k


@triton.jit
def _angles(positions_ptr, inv_freq_ptr, cos_ptr, sin_ptr, scaling, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    halves = tl.arange(0, BLOCK_HALF)
    inv_freq = tl.load(inv_freq_ptr + halves, mask=halves < HALF, other=0.0)
    angles = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
    where = token * HALF + halves
    tl.store(cos_ptr + where, (tl.cos(angles) * scaling).to(cos_ptr.dtype.element_ty), mask=halves < HALF)
    tl.store(sin_ptr + where, (tl.sin(angles) * scaling).to(sin_ptr.dtype.element_ty), mask=halves < HALF)


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rope.rotary_angles`. All tensors contiguous."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    cos = torch.empty((num_tokens, half), dtype=dtype, device=positions.device)
    sin = torch.empty((num_tokens, half), dtype=dtype, device=positions.device)
    if num_tokens:
        _angles[(num_tokens,)](
            *(positions, inv_freq, cos, sin, scaling),
            HALF=half,
            BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=1 if half <= 64 else 2,
        )
    return cos, sin
