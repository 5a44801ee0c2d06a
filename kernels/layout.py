"""Where does every token of a step sit: which position, which row, which cache slot?

Host arithmetic, numpy only (no torch). The functions that share a name with a device kernel in `reference/` are its
host twins: the same arguments, as numpy arrays, and the same result. R rows, T tokens (Tp padded), B blocks per row,
S seats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PAD_SLOT = -1

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[Any]


def make_query_start_loc(query_lens: IntArray) -> Int32Array:
    """First token of each row, and the total at the end.

    query_lens: [R] tokens each row runs (0: does not run). Returns [R + 1] int32, flat over rows of length 0.
    Raises ValueError on a negative length.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    if lens.size and int(lens.min()) < 0:
        raise ValueError("query_lens: negative length")
    starts = np.zeros(lens.shape[0] + 1, dtype=np.int32)
    np.cumsum(lens, out=starts[1:])
    return starts


def make_positions(context_lens: IntArray, query_lens: IntArray) -> Int64Array:
    """Absolute position of every query token: context_len + 0, 1, ... in each row.

    context_lens, query_lens: [R]. Returns [T] int64, T = sum(query_lens).
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    starts = make_query_start_loc(lens).astype(np.int64)
    first = np.asarray(context_lens, dtype=np.int64) - starts[:-1]
    return np.arange(starts[-1], dtype=np.int64) + np.repeat(first, lens)


def token_rows(query_start_loc: IntArray) -> Int64Array:
    """The row of every token. query_start_loc: [R + 1]. Returns [T] int64."""
    starts = np.asarray(query_start_loc, dtype=np.int64)
    return np.repeat(np.arange(starts.shape[0] - 1, dtype=np.int64), np.diff(starts))


def slots_of(block_tables: IntArray, rows: IntArray, positions: IntArray, block_size: int, max_len: int) -> Int64Array:
    """The cache slot of `positions[i]` of row `rows[i]`: block_id * block_size + offset, or PAD_SLOT.

    PAD_SLOT where the position is negative, at or past max_len, past the table's width, or where the table's entry is
    negative. block_tables: [R, B]; rows, positions: [N]. Returns [N] int64.
    """
    positions = np.asarray(positions, dtype=np.int64)
    columns = positions // block_size
    legal = (positions >= 0) & (positions < max_len) & (columns < block_tables.shape[1])
    if block_tables.shape[1] == 0:
        return np.full(positions.shape, PAD_SLOT, dtype=np.int64)
    blocks = block_tables[rows, np.clip(columns, 0, block_tables.shape[1] - 1)].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    return np.where(legal & (blocks >= 0), slots, PAD_SLOT)


def make_slot_mapping(
    block_tables: IntArray,
    positions: IntArray,
    query_start_loc: IntArray,
    block_size: int,
    max_len: int,
    padded_tokens: int,
) -> Int64Array:
    """Cache slot of each query token; PAD_SLOT past the real tokens and at positions >= max_len.

    block_tables: [R, B] int32; positions: [>= T]; query_start_loc: [R + 1]. Returns [padded_tokens] int64.
    Host twin of `reference.slot_mapping.compute_slot_mapping`. Raises ValueError when padded_tokens < T.
    """
    num_tokens = int(query_start_loc[-1])
    if padded_tokens < num_tokens:
        raise ValueError(f"padded_tokens: {padded_tokens} is less than the step's {num_tokens} tokens")
    slots = np.full(padded_tokens, PAD_SLOT, dtype=np.int64)
    rows = token_rows(query_start_loc)
    slots[:num_tokens] = slots_of(block_tables, rows, np.asarray(positions)[:num_tokens], block_size, max_len)
    return slots


def blocks_needed(length: int, block_size: int) -> int:
    """How many blocks hold `length` tokens."""
    return -(-length // block_size)


def make_prefill_inputs(
    input_ids: IntArray,
    query_start_loc: IntArray,
    num_rejected: IntArray,
    anchors: IntArray,
    next_prompt_tokens: IntArray,
    padded_tokens: int,
) -> tuple[Int64Array, Int32Array]:
    """Host twin of `reference.prefill_inputs.prepare_prefill_inputs`, which says what it computes.

    Returns (ids [padded_tokens] int64, last_token_index [R] int32).
    """
    starts = np.asarray(query_start_loc, dtype=np.int64)
    num_tokens = int(starts[-1])
    ids = np.zeros(padded_tokens, dtype=np.int64)
    ids[:num_tokens] = input_ids[:num_tokens]
    last = np.full(starts.shape[0] - 1, -1, dtype=np.int32)
    for row in range(starts.shape[0] - 1):
        start, end = int(starts[row]), int(starts[row + 1])
        if start == end:
            continue
        ids[start : end - 1] = input_ids[start + 1 : end]
        last[row] = end - 1 - int(num_rejected[row])
        following = int(anchors[row]) if int(anchors[row]) >= 0 else int(next_prompt_tokens[row])
        ids[last[row]] = max(following, 0)
    return ids, last


def advance_draft_step(
    positions: Int64Array,
    seq_lens: Int32Array,
    slots: Int64Array,
    block_tables: IntArray,
    block_size: int,
    max_len: int,
    active: BoolArray | None,
) -> None:
    """Host twin of `reference.advance.advance_draft_step`, in place; says there what it computes."""
    live = (seq_lens > 0) & (positions + 1 < max_len)
    if active is not None:
        live &= active
    positions += live
    seq_lens[:] = np.where(live, seq_lens + 1, 0)
    slots[:] = np.where(
        live, slots_of(block_tables, np.arange(positions.shape[0]), positions, block_size, max_len), PAD_SLOT
    )


def make_target_inputs(
    context_lens: IntArray,
    anchors: IntArray,
    seats: IntArray,
    prompt_tokens: IntArray,
    prompt_start_loc: IntArray,
    draft_tokens: IntArray,
    query_start_loc: IntArray,
    is_prompt: BoolArray,
    padded_tokens: int,
) -> tuple[Int64Array, Int64Array]:
    """Host twin of `reference.target_inputs.prepare_target_inputs`, which says what it computes.

    Returns (input_ids, positions), both [padded_tokens] int64.
    """
    input_ids = np.zeros(padded_tokens, dtype=np.int64)
    positions = np.zeros(padded_tokens, dtype=np.int64)
    for row in range(len(query_start_loc) - 1):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        if start == end:
            continue
        seat = int(seats[row])
        positions[start:end] = int(context_lens[seat]) + np.arange(end - start)
        if is_prompt[row]:
            first = int(prompt_start_loc[row])
            input_ids[start:end] = prompt_tokens[first : first + end - start]
            continue
        input_ids[start] = max(int(anchors[seat]), 0)
        drafts = draft_tokens[row, : end - start - 1]
        input_ids[start + 1 : start + 1 + drafts.shape[0]] = np.maximum(drafts, 0)
    return input_ids, positions


def commit_verdict(
    context_lens: IntArray,
    anchors: IntArray,
    seats: IntArray,
    query_lens: IntArray,
    num_rejected: IntArray,
    num_sampled: IntArray,
    last_tokens: IntArray,
) -> None:
    """Host twin of `reference.target_inputs.commit_verdict`, in place on the per-seat state."""
    for row in range(len(seats)):
        seat = int(seats[row])
        if seat < 0 or query_lens[row] == 0:
            continue
        context_lens[seat] += query_lens[row] - num_rejected[row]
        if num_sampled[row] > 0:
            anchors[seat] = last_tokens[row]
