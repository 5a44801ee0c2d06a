"""Which cache slot does each token of the global batch write to? See `reference.slot_mapping`.

One program per row, and one more that fills what lies behind the real tokens: no token has to look for its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens that one program handles at a time: decode and verify rows in one go, prompt chunks in a few.
BLOCK_TOKENS = 128


@triton.jit
def slot_of(table_ptr, width, positions, block_size, max_len, mask):
    """The slots of `positions` of the row whose block table begins at table_ptr; PAD_SLOT (-1) where there is none."""
    columns = positions // block_size
    legal = mask & (positions >= 0) & (positions < max_len) & (columns < width)
    blocks = tl.load(table_ptr + columns, mask=legal, other=-1).to(tl.int64)
    return tl.where(blocks >= 0, blocks * block_size + positions % block_size, -1)


@triton.jit(do_not_specialize=["num_rows", "num_positions", "num_out", "width", "row_stride", "max_len"])
def _slots(
    positions_ptr,
    starts_ptr,
    tables_ptr,
    out_ptr,
    num_rows,
    num_positions,
    num_out,
    width,
    row_stride,
    max_len,
    block_size: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row)
    end = tl.minimum(tl.load(starts_ptr + row + 1, mask=is_row, other=num_out), num_out)
    real_end = tl.where(is_row, tl.minimum(end, num_positions), 0)
    table_ptr = tables_ptr + row.to(tl.int64) * row_stride
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        real = tokens < real_end
        positions = tl.load(positions_ptr + tokens, mask=real, other=-1)
        slots = slot_of(table_ptr, width, positions, block_size, max_len, real)
        tl.store(out_ptr + tokens, slots, mask=tokens < end)


def compute_slot_mapping(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_len: int,
    out: torch.Tensor,
) -> None:
    """See `reference.slot_mapping.compute_slot_mapping`. block_tables: rows may be strided, a row is contiguous."""
    num_rows = query_start_loc.shape[0] - 1
    if out.shape[0] == 0:
        return
    _slots[(num_rows + 1,)](
        positions,
        query_start_loc,
        block_tables,
        out,
        num_rows,
        positions.shape[0],
        out.shape[0],
        block_tables.shape[1],
        block_tables.stride(0),
        max_len,
        block_size=block_size,
        BLOCK=BLOCK_TOKENS,
        num_warps=1,
    )
