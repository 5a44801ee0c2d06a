"""How does the state of a draft step become the state of the next one? See `reference.advance`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.slot_mapping import slot_of

_BLOCK_ROWS = 128


@triton.jit(do_not_specialize=["num_rows", "width", "row_stride", "max_len"])
def _advance(
    positions_ptr,
    seq_lens_ptr,
    slots_ptr,
    tables_ptr,
    active_ptr,
    num_rows,
    width,
    row_stride,
    max_len,
    block_size: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    positions = tl.load(positions_ptr + rows, mask=mask, other=0)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=mask, other=0)
    live = mask & (seq_lens > 0) & (positions + 1 < max_len)
    if HAS_ACTIVE:
        live = live & (tl.load(active_ptr + rows, mask=mask, other=0) != 0)
    positions += live.to(tl.int64)
    slots = slot_of(tables_ptr + rows.to(tl.int64) * row_stride, width, positions, block_size, max_len, live)
    tl.store(positions_ptr + rows, positions, mask=mask)
    tl.store(seq_lens_ptr + rows, tl.where(live, seq_lens + 1, 0), mask=mask)
    tl.store(slots_ptr + rows, slots, mask=mask)


def advance_draft_step(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_len: int,
    active: torch.Tensor | None,
) -> None:
    """See `reference.advance.advance_draft_step`. block_tables: rows may be strided."""
    num_rows = positions.shape[0]
    if num_rows == 0:
        return
    _advance[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        positions,
        seq_lens,
        slots,
        block_tables,
        positions if active is None else active,
        num_rows,
        block_tables.shape[1],
        block_tables.stride(0),
        max_len,
        block_size=block_size,
        HAS_ACTIVE=active is not None,
        BLOCK=_BLOCK_ROWS,
        num_warps=4,
    )
