"""Which cache slot does each token of the global batch write to?

Always computed from the *global batch's* positions: a drafter's own position buffer is stale at rejected rows and
would send writes into live slots. Host twin: `layout.make_slot_mapping`.
"""

from __future__ import annotations

import torch

from kernels.layout import PAD_SLOT


def slots_of(
    block_tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int, max_len: int
) -> torch.Tensor:
    """The cache slot of `positions[i]` of row `rows[i]`, or PAD_SLOT.

    PAD_SLOT where the position is negative, at or past max_len, past the table's width, or where the table's entry is
    negative. block_tables: [R, B] int32; rows, positions: [N] int64. Returns [N] int64.
    """
    width = block_tables.shape[1]
    if width == 0 or block_tables.shape[0] == 0:
        return torch.full_like(positions, PAD_SLOT)
    columns = torch.div(positions, block_size, rounding_mode="floor")
    legal = (positions >= 0) & (positions < max_len) & (columns < width)
    blocks = block_tables[rows, columns.clamp(0, width - 1)].to(torch.int64)
    slots = blocks * block_size + torch.remainder(positions, block_size)
    return torch.where(legal & (blocks >= 0), slots, PAD_SLOT)


def token_rows(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The row of each of the first `num_tokens` tokens, clamped to the last row for tokens past the real ones.

    query_start_loc: [R + 1] int32, R >= 1. Returns [num_tokens] int64. Rows of length 0 own no token.
    """
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    rows = torch.searchsorted(query_start_loc, tokens, right=True) - 1
    return rows.clamp(0, query_start_loc.shape[0] - 2)


def compute_slot_mapping(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_len: int,
    out: torch.Tensor,
) -> None:
    """Fill `out` with the slot of every token; PAD_SLOT past the real tokens and at positions >= max_len.

    positions: [N] int64, of which the first query_start_loc[-1] are real; query_start_loc: [R + 1] int32; block_tables:
    [R, B] int32; max_len: tokens (the length limit); out: [Tp] int64, every element is written.
    """
    out.fill_(PAD_SLOT)
    num_tokens = min(positions.shape[0], out.shape[0])
    if num_tokens == 0 or query_start_loc.shape[0] < 2:
        return
    rows = token_rows(query_start_loc, num_tokens)
    slots = slots_of(block_tables, rows, positions[:num_tokens], block_size, max_len)
    real = torch.arange(num_tokens, device=out.device) < query_start_loc[-1]
    out[:num_tokens] = torch.where(real, slots, PAD_SLOT)
