"""How does a step get into the ring, when only the device knows which of its rows ran?

Everything that the drafter is told of a step but the tag: rows that did not run lose their tokens, the tokens of the
others close up, and what the batch was padded with is left out, absent drafts included. Whoever calls this writes the
header's seq afterwards, in a kernel of its own, and publishes.
"""

from __future__ import annotations

import torch

from kernels.reference.slot_mapping import token_rows


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
) -> None:
    """Write the entry of a step of R rows. A row ran when its seat is not negative; its tokens in the entry are the
    first query_lens[row] of its tokens in the batch.

    max_tokens: the plan's tokens, at least what the rows that ran add up to. batch_starts: [R + 1] int32, where each
    row's tokens begin in the batch, padded ones included. seats, query_lens: [R] int32; seq_lens: [R] int32, the
    batch's (its padded tokens included). num_sampled, num_rejected [R] int32; anchors, next_prompt_tokens, seeds [R]
    int64; temperatures [R] float32. positions, input_ids, slots: [T] int64, of the batch. block_tables: [R, B] int32,
    None: not told. hidden: [T, W], None: not asked for.
    Outputs: an entry's tensors at full size (`engine.channel.interface.RingEntry` says what they hold; here they are
    only memory), of which the first R rows and the first tokens are written; out_header [8] int64, all but its first
    word.
    """
    num_rows = seats.shape[0]
    lens = torch.where(seats >= 0, query_lens, 0)
    starts = torch.zeros_like(batch_starts)
    starts[1:] = lens.cumsum(0)
    out_header[1] = epoch
    out_header[2] = num_rows
    out_header[3] = starts[-1]
    out_query_start_loc[: num_rows + 1] = starts
    if num_rows == 0:
        return
    in_batch = batch_starts[1:] - batch_starts[:-1]
    out_seq_lens[:num_rows] = torch.where(lens > 0, seq_lens - in_batch + query_lens, 0)
    for source, out in (
        (seats, out_seats),
        (num_sampled, out_num_sampled),
        (num_rejected, out_num_rejected),
        (anchors, out_anchors),
        (next_prompt_tokens, out_next_prompt_tokens),
        (temperatures, out_temperatures),
        (seeds, out_seeds),
    ):
        out[:num_rows] = source
    if block_tables is not None:
        out_block_tables[:num_rows, : block_tables.shape[1]] = block_tables
    if max_tokens == 0:
        return
    tokens = torch.arange(max_tokens, device=seats.device)
    rows = token_rows(starts, max_tokens)
    # Behind the real tokens the entry gets copies of some token or other, which nobody reads.
    where = (batch_starts[rows] + tokens - starts[rows]).clamp(0, positions.shape[0] - 1)
    out_positions[:max_tokens] = positions[where]
    out_input_ids[:max_tokens] = input_ids[where]
    out_slot_mapping[:max_tokens] = slots[where]
    if hidden is not None and out_hidden is not None:
        out_hidden[:max_tokens] = hidden[where]
