"""How do all KV groups of a model get a step's metadata at once?

The rows of a step are classified once (runs, or does not), and every group's rows are filled from that: its lengths,
its block tables, its slots, the padded rows that a captured graph reads included. On a GPU it is one launch, however
many groups there are; here it is one group after the other, each through `compute_slot_mapping`, so that a group's own
metadata remains the yardstick. The groups' buffers are slices of common ones, made once and only ever written in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.reference.slot_mapping import compute_slot_mapping


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
    """Fill the metadata of G groups for R rows and T tokens, padded to Rp >= R rows and Tp >= T tokens.

    A row runs when its seat is not negative and it has tokens. It gets its seq_len, its seat's block tables, and its
    tokens' slots. Every other row, the padded ones Rp > r >= R included, gets seq_len 0 and a table of zeros (the null
    block), and its tokens, if any, PAD_SLOT. Tokens behind the real ones get PAD_SLOT, query_start_loc is flat behind
    the real rows.

    seats: [R] int32; query_start_loc: [R + 1] int32; seq_lens: [R] int32, this step's tokens included; positions:
    [>= T] int64, the global batch's; seat_tables: [G, S, B] int32, each group's block tables by seat (a group that
    needs fewer than B columns leaves the rest); block_sizes: G numbers; max_len: tokens. Outputs, every element
    written: out_query_start_loc [Rp + 1] int32, out_seq_lens [G, Rp] int32, out_block_tables [G, Rp, B] int32,
    out_slots [G, Tp] int64.
    """
    num_rows = seats.shape[0]
    out_query_start_loc[: num_rows + 1] = query_start_loc
    out_query_start_loc[num_rows + 1 :] = query_start_loc[-1:]
    runs = (seats >= 0) & (query_start_loc[1:] > query_start_loc[:-1])
    index = seats.clamp(min=0).to(torch.int64)
    for group, block_size in enumerate(block_sizes):
        out_seq_lens[group].zero_()
        out_seq_lens[group, :num_rows] = torch.where(runs, seq_lens, 0)
        tables = seat_tables[group, index]
        out_block_tables[group].zero_()
        out_block_tables[group, :num_rows] = torch.where(runs[:, None], tables, 0)
        # A row that does not run must not write: a negative entry has no slot.
        writable = torch.where(runs[:, None], tables, -1)
        compute_slot_mapping(positions, query_start_loc, writable, block_size, max_len, out_slots[group])
