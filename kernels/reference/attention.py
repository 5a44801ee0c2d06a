"""What is paged attention, said as plainly as possible? One row at a time, fp32, a full score matrix with a mask."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of each row's query tokens over its cache, whose KV is written already.

    Query token j of a row sits at position p = seq_len - query_len + j and sees positions 0 .. p, or the last
    `window` of them (its own included). Tokens of no row, and of rows with seq_len 0, get zeros.

    q: [T, Hq, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D]; query_start_loc: [R + 1] int32; seq_lens: [R]
    int32; block_tables: [R, B] int32. Returns [T, Hq, D] of q's dtype.
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end or seq_len == 0:
            continue
        blocks = block_tables[row, : -(-seq_len // block_size)].to(torch.int64)
        keys = k_cache[blocks].reshape(-1, num_kv_heads, head_dim)[:seq_len].float()
        values = v_cache[blocks].reshape(-1, num_kv_heads, head_dim)[:seq_len].float()
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_positions = torch.arange(seq_len, device=q.device)[None, :]
        seen = key_positions <= query_positions
        if window is not None:
            seen &= key_positions > query_positions - window
        probs = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)
    return out
