"""How does one new token per sequence attend to that sequence's dense cache on a GPU?

A Triton kernel: one program per (sequence, KV head), all query heads of the group together, online softmax over the
sequence's own length. Only used to write training text in large batches; serving has its own paged attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64
_MIN_DOT_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]  # not annotated; absent on machines without a GPU
def _decode_kernel(  # type: ignore[no-untyped-def]  # Triton reads the bare signature
    q_ptr,
    k_ptr,
    v_ptr,
    lens_ptr,
    out_ptr,
    scale,
    capacity,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    query_offsets = ((sequence * NUM_KV_HEADS + kv_head) * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + query_offsets, mask=(rows < GROUP)[:, None], other=0.0)
    highest = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, HEAD_DIM), tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    for start in range(first, length, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        seen = tokens < length
        if WINDOW > 0:
            seen = seen & (tokens >= length - WINDOW)
        offsets = ((sequence * capacity + tokens) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        shrink = tl.exp(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    acc = acc / total[:, None]
    tl.store(out_ptr + query_offsets, acc.to(out_ptr.dtype.element_ty), mask=(rows < GROUP)[:, None])


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lens: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of one query per sequence.

    q: [B, Hq, D], D a power of two. k_cache, v_cache: [B, S, Hkv, D], contiguous. lens: [B], at least 1, the query's
    own token included. window: tokens seen, itself included. Returns [B, Hq, D] in q's dtype.
    """
    batch, num_heads, head_dim = q.shape
    capacity, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode_kernel[(batch, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        lens,
        out,
        scale,
        capacity,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        WINDOW=window or 0,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
