"""How do all KV groups of a model get a step's metadata in one launch? See `reference.metadata_fill`.

One program per row classifies it and fills it in every group; one more fills what lies behind the real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.slot_mapping import BLOCK_TOKENS, slot_of


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_positions", "padded_rows", "num_out", "width", "max_len"),
        *("tables_group_stride", "tables_row_stride", "lens_stride", "out_group_stride", "out_row_stride"),
        "slots_stride",
    ]
)
def _fill(
    seats_ptr,
    starts_ptr,
    seq_lens_ptr,
    positions_ptr,
    seat_tables_ptr,
    out_starts_ptr,
    out_seq_lens_ptr,
    out_tables_ptr,
    out_slots_ptr,
    num_rows,
    num_positions,
    padded_rows,
    num_out,
    width,
    max_len,
    tables_group_stride,
    tables_row_stride,
    lens_stride,
    out_group_stride,
    out_row_stride,
    slots_stride,
    BLOCK_SIZES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_row = row < num_rows
    total = tl.load(starts_ptr + num_rows)
    start = tl.load(starts_ptr + row, mask=is_row, other=0)
    start = tl.where(is_row, start, total)
    row_end = tl.load(starts_ptr + row + 1, mask=is_row, other=0)
    row_end = tl.where(is_row, row_end, total)
    # The classification, once for all groups.
    seat = tl.load(seats_ptr + row, mask=is_row, other=-1)
    runs = is_row & (seat >= 0) & (row_end > start)
    seq_len = tl.load(seq_lens_ptr + row, mask=runs, other=0)
    seat = tl.maximum(seat, 0).to(tl.int64)
    tl.store(out_starts_ptr + row, start)
    # The last program owns the tokens of no row; a padded row owns none.
    end = tl.minimum(tl.where(row == padded_rows, num_out, row_end), num_out)
    real_end = tl.where(runs, tl.minimum(end, num_positions), 0)
    # What this row's program writes of a block table, and how much of that comes from the seat's.
    out_width = tl.where(row < padded_rows, width, 0)
    seat_width = tl.where(runs, width, 0)
    for group in tl.static_range(NUM_GROUPS):
        table_ptr = seat_tables_ptr + group * tables_group_stride + seat * tables_row_stride
        out_table_ptr = out_tables_ptr + group * out_group_stride + row * out_row_stride
        tl.store(out_seq_lens_ptr + group * lens_stride + row, seq_len, mask=row < padded_rows)
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            blocks = tl.load(table_ptr + columns, mask=columns < seat_width, other=0)
            tl.store(out_table_ptr + columns, blocks, mask=columns < out_width)
        for first in range(start, end, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            real = tokens < real_end
            positions = tl.load(positions_ptr + tokens, mask=real, other=-1)
            slots = slot_of(table_ptr, width, positions, BLOCK_SIZES[group], max_len, real)
            tl.store(out_slots_ptr + group * slots_stride + tokens, slots, mask=tokens < end)


def fill_metadata(
    seats: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    seat_tables: torch.Tensor,
    block_sizes: Sequence[int],
    max_len: int,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_block_tables: torch.Tensor,
    out_slots: torch.Tensor,
) -> None:
    """See `reference.metadata_fill.fill_metadata`. Last dimensions are contiguous; outputs may be
    the leading rows and tokens of larger buffers.
    """
    padded_rows = out_seq_lens.shape[1]
    _fill[(padded_rows + 1,)](
        seats,
        query_start_loc,
        seq_lens,
        positions,
        seat_tables,
        out_query_start_loc,
        out_seq_lens,
        out_block_tables,
        out_slots,
        seats.shape[0],
        positions.shape[0],
        padded_rows,
        out_slots.shape[1],
        seat_tables.shape[2],
        max_len,
        seat_tables.stride(0),
        seat_tables.stride(1),
        out_seq_lens.stride(0),
        out_block_tables.stride(0),
        out_block_tables.stride(1),
        out_slots.stride(0),
        BLOCK_SIZES=tuple(block_sizes),
        NUM_GROUPS=len(block_sizes),
        BLOCK=BLOCK_TOKENS,
        num_warps=1,
    )
