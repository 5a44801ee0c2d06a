"""How does a step get into the ring? See `reference.ring_entry`.

One launch: program (i, c) copies the c-th stretch of the i-th token's hidden state; those with c = 0 also write the
rest of token i, and of row i. Each finds its token's row by itself, from the lengths of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.forms import Form
from kernels.triton.prepared import Launch, Launcher, launch, prepare

_BLOCK_HIDDEN = 2048
_BLOCK_TABLE = 1024


@triton.jit(do_not_specialize=[*("epoch", "num_rows", "max_tokens", "table_width", "table_stride", "out_table_stride")])
def _ring_entry(
    epoch,
    num_rows,
    max_tokens,
    batch_starts_ptr,
    seats_ptr,
    query_lens_ptr,
    seq_lens_ptr,
    sampled_ptr,
    rejected_ptr,
    anchors_ptr,
    next_prompt_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    ids_ptr,
    slots_ptr,
    tables_ptr,
    hidden_ptr,
    header_ptr,
    out_starts_ptr,
    out_seats_ptr,
    out_seq_lens_ptr,
    out_sampled_ptr,
    out_rejected_ptr,
    out_anchors_ptr,
    out_next_prompt_ptr,
    out_temperatures_ptr,
    out_seeds_ptr,
    out_positions_ptr,
    out_ids_ptr,
    out_slots_ptr,
    out_tables_ptr,
    out_hidden_ptr,
    table_width,
    table_stride,
    out_table_stride,
    hidden_stride,
    HIDDEN_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
):
    index = tl.program_id(0)
    stretch = tl.program_id(1)
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    seats = tl.load(seats_ptr + rows, mask=is_row, other=-1)
    lens = tl.load(query_lens_ptr + rows, mask=is_row & (seats >= 0), other=0)
    ends = tl.cumsum(lens, axis=0)
    total = tl.sum(lens, axis=0)
    if (index < total) & (index < max_tokens):
        row = tl.sum((is_row & (ends <= index)).to(tl.int32), axis=0)
        start = tl.sum(tl.where(rows < row, lens, 0), axis=0)
        where = (tl.load(batch_starts_ptr + row) + index - start).to(tl.int64)
        if HIDDEN_WIDTH > 0:
            columns = stretch * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
            state = tl.load(hidden_ptr + where * hidden_stride + columns, mask=columns < HIDDEN_WIDTH)
            out_hidden = out_hidden_ptr + index.to(tl.int64) * HIDDEN_WIDTH
            tl.store(out_hidden + columns, state, mask=columns < HIDDEN_WIDTH)
        if stretch == 0:
            tl.store(out_positions_ptr + index, tl.load(positions_ptr + where))
            tl.store(out_ids_ptr + index, tl.load(ids_ptr + where))
            tl.store(out_slots_ptr + index, tl.load(slots_ptr + where))
    if (stretch == 0) & (index <= num_rows):
        tl.store(out_starts_ptr + index, tl.sum(tl.where(rows < index, lens, 0), axis=0))
        if index < num_rows:
            seat = tl.load(seats_ptr + index)
            query_len = tl.load(query_lens_ptr + index)
            in_batch = tl.load(batch_starts_ptr + index + 1) - tl.load(batch_starts_ptr + index)
            seq_len = tl.load(seq_lens_ptr + index) - in_batch + query_len
            tl.store(out_seats_ptr + index, seat)
            tl.store(out_seq_lens_ptr + index, tl.where((seat >= 0) & (query_len > 0), seq_len, 0))
            tl.store(out_sampled_ptr + index, tl.load(sampled_ptr + index))
            tl.store(out_rejected_ptr + index, tl.load(rejected_ptr + index))
            tl.store(out_anchors_ptr + index, tl.load(anchors_ptr + index))
            tl.store(out_next_prompt_ptr + index, tl.load(next_prompt_ptr + index))
            tl.store(out_temperatures_ptr + index, tl.load(temperatures_ptr + index))
            tl.store(out_seeds_ptr + index, tl.load(seeds_ptr + index))
            for first in range(0, table_width, BLOCK_TABLE):
                columns = first + tl.arange(0, BLOCK_TABLE)
                blocks = tl.load(tables_ptr + index.to(tl.int64) * table_stride + columns, mask=columns < table_width)
                out_table = out_tables_ptr + index.to(tl.int64) * out_table_stride
                tl.store(out_table + columns, blocks, mask=columns < table_width)
        else:
            tl.store(header_ptr + 1, tl.full([], 0, tl.int64) + epoch)
            tl.store(header_ptr + 2, tl.full([], 0, tl.int64) + num_rows)
            tl.store(header_ptr + 3, tl.full([], 0, tl.int64) + total)


def write_ring_entry(
    epoch: int,
    max_tokens: int,
    batch_starts: torch.Tensor,
    seats: torch.Tensor,
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    anchors: torch.Tensor,
    next_prompt_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor | None,
    hidden: torch.Tensor | None,
    out_header: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seats: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_num_sampled: torch.Tensor,
    out_num_rejected: torch.Tensor,
    out_anchors: torch.Tensor,
    out_next_prompt_tokens: torch.Tensor,
    out_temperatures: torch.Tensor,
    out_seeds: torch.Tensor,
    out_positions: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    out_block_tables: torch.Tensor,
    out_hidden: torch.Tensor | None,
    *,
    launcher: Launcher = launch,
) -> None:
    """See `reference.ring_entry.write_ring_entry`. Last dimensions are contiguous; out_hidden is contiguous."""
    num_rows = seats.shape[0]
    with_hidden = hidden is not None and out_hidden is not None
    width = hidden.shape[1] if hidden is not None and with_hidden else 0
    block = min(_BLOCK_HIDDEN, triton.next_power_of_2(max(width, 1)))
    # Where there is nothing to copy, another tensor stands in for the pointer.
    arguments = (
        epoch,
        num_rows,
        max_tokens,
        batch_starts,
        seats,
        query_lens,
        seq_lens,
        num_sampled,
        num_rejected,
        anchors,
        next_prompt_tokens,
        temperatures,
        seeds,
        positions,
        input_ids,
        slots,
        out_block_tables if block_tables is None else block_tables,
        hidden if hidden is not None and with_hidden else positions,
        out_header,
        out_query_start_loc,
        out_seats,
        out_seq_lens,
        out_num_sampled,
        out_num_rejected,
        out_anchors,
        out_next_prompt_tokens,
        out_temperatures,
        out_seeds,
        out_positions,
        out_input_ids,
        out_slot_mapping,
        out_block_tables,
        out_hidden if out_hidden is not None and with_hidden else out_positions,
        0 if block_tables is None else block_tables.shape[1],
        0 if block_tables is None else block_tables.stride(0),
        out_block_tables.stride(0),
        hidden.stride(0) if hidden is not None and with_hidden else 0,
    )
    options = {
        "HIDDEN_WIDTH": width,
        "BLOCK_ROWS": max(1, triton.next_power_of_2(num_rows)),
        "BLOCK_HIDDEN": block,
        "BLOCK_TABLE": _BLOCK_TABLE,
        "num_warps": 4,
    }
    grid = (max(max_tokens, num_rows + 1), max(1, triton.cdiv(width, block)))
    launcher(Launch(_ring_entry, grid, arguments, options, ("max_tokens",)))


def prepare_write_ring_entry(*arguments: Any) -> Form | None:
    """`write_ring_entry`, and its later launches: see `forms.Preparations`."""
    form = prepare(write_ring_entry, arguments)
    if form is None:
        return None
    seats: torch.Tensor = arguments[3]
    least, stretches = seats.shape[0] + 1, form.first.grid[1]
    return lambda max_tokens: form((max(max_tokens, least), stretches), max_tokens)
