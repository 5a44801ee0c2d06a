"""How does the drafter take a ring entry over on the device? See `reference.take_entry`.

One launch. One program per padded row reads the row's numbers, checks them, and copies its tokens; one more fills what
lies behind the real tokens; the rest bring the block tables up to date. Each row's program looks at the tag before its
first and after its last look at the entry, past the compiler and the caches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.forms import Form
from kernels.reference import take_entry as names
from kernels.reference.take_entry import PLAN_FIELDS, RECORD_FIELDS, EntryTensors, TakenLayout, TakenRows
from kernels.triton.prepared import Launch, Launcher, launch, prepare
from kernels.triton.slot_mapping import BLOCK_TOKENS

_BLOCK_STARTS = 256
_BLOCK_UPDATES = 256

_SEAT, _QUERY_LEN, _CAPACITY = tl.constexpr(names.SEAT), tl.constexpr(names.QUERY_LEN), tl.constexpr(names.CAPACITY)
_MAX_TOTAL_LEN, _DRAFT_LEN = tl.constexpr(names.MAX_TOTAL_LEN), tl.constexpr(names.DRAFT_LEN)
_FRESH, _START, _COMPUTED = tl.constexpr(names.FRESH), tl.constexpr(names.START), tl.constexpr(names.COMPUTED)
_SAMPLES = tl.constexpr(names.SAMPLES)
_UNFOLLOWED, _RAN, _ABSENT = tl.constexpr(names.UNFOLLOWED), tl.constexpr(names.RAN), tl.constexpr(names.ABSENT)
_SKIPPED, _WRONG, _HOLE = tl.constexpr(names.SKIPPED), tl.constexpr(names.WRONG), tl.constexpr(names.HOLE)
_TOO_LONG, _NO_ROOM = tl.constexpr(names.TOO_LONG), tl.constexpr(names.NO_ROOM)
_HEADER_EPOCH, _HEADER_ROWS = tl.constexpr(names.HEADER_EPOCH), tl.constexpr(names.HEADER_ROWS)
_HEADER_TOKENS = tl.constexpr(names.HEADER_TOKENS)
_FIELDS = tl.constexpr(PLAN_FIELDS)


@triton.jit
def _entry_tokens(header_ptr, starts_ptr, num_rows, seq, epoch, max_entry_tokens, BLOCK: tl.constexpr):
    """Tokens of the entry, or -1 where its tag is another or its rows are no partition of them."""
    num_tokens = tl.load(header_ptr + _HEADER_TOKENS, volatile=True)
    right = (tl.load(header_ptr, volatile=True) == seq) & (tl.load(header_ptr + _HEADER_EPOCH, volatile=True) == epoch)
    right = right & (tl.load(header_ptr + _HEADER_ROWS, volatile=True) == num_rows)
    right = right & (num_tokens >= 0) & (num_tokens <= max_entry_tokens)
    right = right & (tl.load(starts_ptr) == 0) & (tl.load(starts_ptr + num_rows) == num_tokens)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        begins = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        ends = tl.load(starts_ptr + rows + 1, mask=rows < num_rows, other=0)
        right = right & (tl.sum((ends < begins).to(tl.int32), axis=0) == 0)
    return tl.where(right, num_tokens, -1)


# Pointers into the channel and into a plan are not specialised by their alignment, which differs from entry to entry:
# every other one would wait for the compiler in the middle of serving.
@triton.jit(
    do_not_specialize=[
        *("header_ptr", "positions_ptr", "ids_ptr", "starts_ptr", "seq_lens_ptr", "rejected_ptr", "anchors_ptr"),
        *("following_ptr", "temperatures_ptr", "seeds_ptr", "slots_ptr", "tables_ptr", "plan_ptr", "updates_ptr"),
        "reply_header_ptr",
        *("num_rows", "padded_rows", "padded_tokens", "num_updates", "seq", "epoch", "max_entry_tokens"),
        *("vocab_size", "max_len", "num_seats", "plan_stride", "entry_width", "tables_width", "tables_stride"),
        *("num_blocks",),
    ]
)
def _take(
    header_ptr,
    positions_ptr,
    ids_ptr,
    starts_ptr,
    seq_lens_ptr,
    rejected_ptr,
    anchors_ptr,
    following_ptr,
    temperatures_ptr,
    seeds_ptr,
    slots_ptr,
    tables_ptr,
    plan_ptr,
    updates_ptr,
    state_ptr,
    seat_tables_ptr,
    reply_header_ptr,
    out_starts_ptr,
    out_seats_ptr,
    out_seq_lens_ptr,
    out_rejected_ptr,
    out_anchors_ptr,
    out_following_ptr,
    out_positions_ptr,
    out_ids_ptr,
    out_step_positions_ptr,
    out_step_seq_lens_ptr,
    out_drafts_ptr,
    out_anchor_positions_ptr,
    out_temperatures_ptr,
    out_seeds_ptr,
    out_records_ptr,
    out_slots_ptr,
    out_tables_ptr,
    num_rows,
    padded_rows,
    padded_tokens,
    num_updates,
    seq,
    epoch,
    max_entry_tokens,
    vocab_size,
    max_len,
    num_seats,
    plan_stride,
    entry_width,
    tables_width,
    tables_stride,
    num_blocks,
    block_size: tl.constexpr,
    HAS_LAYOUT: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANGES: tl.constexpr,
):
    row = tl.program_id(0)
    if row > padded_rows:
        # Programs of the block tables.
        changes = (row - padded_rows - 1) * BLOCK_CHANGES + tl.arange(0, BLOCK_CHANGES)
        where = tl.load(updates_ptr + changes, mask=changes < num_updates, other=0)
        blocks = tl.load(updates_ptr + num_updates + changes, mask=changes < num_updates, other=0)
        tl.store(seat_tables_ptr + where, blocks, mask=changes < num_updates)
        return
    if row == 0:
        tl.store(reply_header_ptr, tl.full([], 0, tl.int64))
    entry_tokens = _entry_tokens(header_ptr, starts_ptr, num_rows, seq, epoch, max_entry_tokens, BLOCK_ROWS)
    present = entry_tokens >= 0
    total = tl.maximum(entry_tokens, 0).to(tl.int32)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row, mask=is_row & present, other=0)
    end = tl.load(starts_ptr + row + 1, mask=is_row & present, other=0)
    # Read after they were checked: a peer that overwrites the entry meanwhile must not lead past the buffers.
    start = tl.where(is_row, tl.minimum(tl.maximum(start, 0), total), total)
    end = tl.where(is_row, tl.minimum(tl.maximum(end, start), total), total)
    tl.store(out_starts_ptr + row, start)
    if row == padded_rows:
        # Behind the real tokens.
        for first in range(total, padded_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            tl.store(out_positions_ptr + tokens, tl.zeros([BLOCK], tl.int64), mask=tokens < padded_tokens)
            tl.store(out_ids_ptr + tokens, tl.zeros([BLOCK], tl.int64), mask=tokens < padded_tokens)
            if HAS_LAYOUT:
                tl.store(out_slots_ptr + tokens, tl.full([BLOCK], -1, tl.int64), mask=tokens < padded_tokens)
        return

    seat = tl.load(plan_ptr + _SEAT * plan_stride + row, mask=is_row, other=-1)
    followed = seat >= 0
    fresh = followed & (tl.load(plan_ptr + _FRESH * plan_stride + row, mask=is_row, other=0) != 0)
    known = followed & (fresh == 0)
    seat_start = tl.load(state_ptr + seat, mask=known, other=0)
    computed = tl.load(state_ptr + num_seats + seat, mask=known, other=0)
    first_start = tl.load(plan_ptr + _START * plan_stride + row, mask=is_row, other=0)
    first_computed = tl.load(plan_ptr + _COMPUTED * plan_stride + row, mask=is_row, other=0)
    tl.store(state_ptr + seat, first_start, mask=fresh)
    tl.store(state_ptr + num_seats + seat, first_computed, mask=fresh)
    seat_start = tl.where(fresh, first_start, seat_start).to(tl.int64)
    computed = tl.where(fresh, first_computed, computed).to(tl.int64)

    query_len = (end - start).to(tl.int64)
    context_len = tl.load(seq_lens_ptr + row, mask=is_row, other=0).to(tl.int64) - query_len
    rejected = tl.load(rejected_ptr + row, mask=is_row, other=0).to(tl.int64)
    anchor = tl.load(anchors_ptr + row, mask=is_row, other=-1)
    following = tl.load(following_ptr + row, mask=is_row, other=-1)
    temperature = tl.load(temperatures_ptr + row, mask=is_row, other=0.0)
    seed = tl.load(seeds_ptr + row, mask=is_row, other=0)
    begins = seat_start < 0
    seat_start = tl.where(begins, context_len, seat_start)
    computed = tl.where(begins, context_len, computed)
    max_query = tl.load(plan_ptr + _QUERY_LEN * plan_stride + row, mask=is_row, other=0)
    wrong = (context_len < 0) | (query_len > max_query) | (rejected < 0) | (rejected >= query_len)
    wrong = wrong | (anchor < -1) | (anchor >= vocab_size) | (following < -1) | (following >= vocab_size)

    num_bad = tl.full([], 0, tl.int32)
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        mask = tokens < end
        expected = context_len + (tokens - start)
        positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
        ids = tl.load(ids_ptr + tokens, mask=mask, other=0)
        bad = mask & ((positions != expected) | (ids < 0) | (ids >= vocab_size))
        num_bad += tl.sum(bad.to(tl.int32), axis=0)
        own = tl.minimum(tl.maximum(expected - seat_start, 0), max_len)
        tl.store(out_positions_ptr + tokens, own, mask=mask)
        tl.store(out_ids_ptr + tokens, tl.minimum(tl.maximum(ids, 0), vocab_size - 1), mask=mask)
        if HAS_LAYOUT:
            slots = tl.load(slots_ptr + tokens, mask=mask, other=-1)
            legal = (slots >= 0) & (slots < num_blocks.to(tl.int64) * block_size)
            tl.store(out_slots_ptr + tokens, tl.where(legal, slots, -1), mask=mask)
    wrong = wrong | (num_bad > 0)

    capacity = tl.load(plan_ptr + _CAPACITY * plan_stride + row, mask=is_row, other=0).to(tl.int64)
    if HAS_LAYOUT:
        held = tables_width
        given = tl.where(is_row, tl.minimum(entry_width, tables_width), 0)
        for first in range(0, tables_width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            blocks = tl.load(tables_ptr + row.to(tl.int64) * entry_width + columns, mask=columns < given, other=0)
            blocks = tl.where((blocks >= 0) & (blocks < num_blocks), blocks, 0)
            tl.store(out_tables_ptr + row.to(tl.int64) * tables_stride + columns, blocks, mask=columns < tables_width)
            empty = (columns < tables_width) & (blocks == 0)
            held = tl.minimum(held, tl.min(tl.where(empty, columns, tables_width), axis=0))
        capacity = held.to(tl.int64) * block_size

    row_end = context_len + query_len - seat_start
    status = tl.full([], _RAN, tl.int32)
    status = tl.where(row_end > capacity, _NO_ROOM, status)
    status = tl.where(row_end > max_len, _TOO_LONG, status)
    status = tl.where((context_len < seat_start) | (context_len > computed), _HOLE, status)
    status = tl.where(wrong, _WRONG, status)
    status = tl.where(query_len == 0, _SKIPPED, status)
    same = (tl.load(header_ptr, volatile=True) == seq) & present
    status = tl.where(same, status, _ABSENT)
    status = tl.where(followed, status, _UNFOLLOWED)
    runs = is_row & (status == _RAN)
    if HAS_LAYOUT:
        hidden_from = tl.where(runs, end, start)
        for first in range(hidden_from, end, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            tl.store(out_slots_ptr + tokens, tl.full([BLOCK], -1, tl.int64), mask=tokens < end)

    committed = context_len + query_len - rejected
    own_len = committed - seat_start
    draft_len = tl.load(plan_ptr + _DRAFT_LEN * plan_stride + row, mask=is_row, other=0).to(tl.int64)
    longest = tl.load(plan_ptr + _MAX_TOTAL_LEN * plan_stride + row, mask=is_row, other=0).to(tl.int64)
    drafts = tl.minimum(draft_len, longest - committed - 2)
    drafts = tl.maximum(tl.minimum(drafts, tl.minimum(capacity, max_len) - own_len + 1), 0)
    drafts = tl.where(runs & (anchor >= 0), drafts, 0)
    samples = tl.load(plan_ptr + _SAMPLES * plan_stride + row, mask=is_row, other=0) != 0
    drawn = runs & samples & (temperature > 0) & (temperature < float("inf"))

    tl.store(out_seats_ptr + row, tl.where(runs, seat, -1))
    tl.store(out_seq_lens_ptr + row, tl.where(runs, row_end, 0).to(tl.int32))
    tl.store(out_rejected_ptr + row, tl.where(runs, rejected, 0).to(tl.int32))
    tl.store(out_anchors_ptr + row, tl.where(runs, anchor, -1))
    tl.store(out_following_ptr + row, tl.where(runs, following, -1))
    tl.store(out_step_positions_ptr + row, tl.where(runs, own_len - 1, 0))
    tl.store(out_step_seq_lens_ptr + row, tl.where(drafts > 0, own_len, 0).to(tl.int32))
    tl.store(out_drafts_ptr + row, drafts.to(tl.int32))
    tl.store(out_anchor_positions_ptr + row, tl.where(runs, committed, 0))
    tl.store(out_temperatures_ptr + row, tl.where(drawn, temperature, 0.0))
    tl.store(out_seeds_ptr + row, tl.where(runs, seed, 0))
    record_ptr = out_records_ptr + row * RECORD
    tl.store(record_ptr, status.to(tl.int64), mask=is_row)
    tl.store(record_ptr + 1, context_len, mask=is_row)
    tl.store(record_ptr + 2, start.to(tl.int64), mask=is_row)
    tl.store(record_ptr + 3, query_len, mask=is_row)
    tl.store(record_ptr + 4, rejected, mask=is_row)
    tl.store(record_ptr + 5, anchor, mask=is_row)
    tl.store(record_ptr + 6, seat_start, mask=is_row)
    tl.store(record_ptr + 7, drafts, mask=is_row)


def take_entry(
    entry: EntryTensors,
    plan: torch.Tensor,
    table_updates: torch.Tensor,
    seq: int,
    epoch: int,
    max_entry_tokens: int,
    vocab_size: int,
    max_len: int,
    seat_state: torch.Tensor,
    seat_tables: torch.Tensor,
    reply_header: torch.Tensor,
    taken: TakenRows,
    layout: TakenLayout | None,
    *,
    launcher: Launcher = launch,
) -> None:
    """See `reference.take_entry.take_entry`. The last dimension of every tensor is contiguous; seat_tables,
    table_updates and seat_state are contiguous, and so is the entry, as it lies in the channel.
    """
    num_rows, padded_rows, num_updates = plan.shape[1], taken.seats.shape[0], table_updates.shape[1]
    out_slots = taken.positions if layout is None else layout.slots
    out_tables = seat_tables if layout is None else layout.block_tables
    arguments = (
        entry.header,
        entry.positions,
        entry.input_ids,
        entry.query_start_loc,
        entry.seq_lens,
        entry.num_rejected,
        entry.anchors,
        entry.next_prompt_tokens,
        entry.temperatures,
        entry.seeds,
        entry.slot_mapping,
        entry.block_tables,
        plan,
        table_updates,
        seat_state,
        seat_tables,
        reply_header,
        taken.query_start_loc,
        taken.seats,
        taken.seq_lens,
        taken.num_rejected,
        taken.anchors,
        taken.next_prompt_tokens,
        taken.positions,
        taken.input_ids,
        taken.step_positions,
        taken.step_seq_lens,
        taken.num_drafts,
        taken.anchor_positions,
        taken.temperatures,
        taken.seeds,
        taken.records,
        out_slots,
        out_tables,
        num_rows,
        padded_rows,
        taken.positions.shape[0],
        num_updates,
        seq,
        epoch,
        max_entry_tokens,
        vocab_size,
        max_len,
        seat_state.shape[1],
        plan.stride(0),
        entry.block_tables.shape[1],
        out_tables.shape[1],
        out_tables.stride(0),
        1 if layout is None else layout.num_blocks,
    )
    options = {
        "block_size": 1 if layout is None else layout.block_size,
        "HAS_LAYOUT": layout is not None,
        "RECORD": RECORD_FIELDS,
        "BLOCK": BLOCK_TOKENS,
        "BLOCK_ROWS": _BLOCK_STARTS,
        "BLOCK_CHANGES": _BLOCK_UPDATES,
        "num_warps": 1,
    }
    varying = ("padded_rows", "padded_tokens", "num_updates", "seq", "max_entry_tokens")
    launcher(Launch(_take, (_num_programs(padded_rows, num_updates),), arguments, options, varying))


def prepare_take_entry(*arguments: Any) -> Form | None:
    """`take_entry`, and its later launches: see `forms.Preparations`."""
    form = prepare(take_entry, arguments)
    if form is None:
        return None

    def again(padded_rows: int, padded_tokens: int, num_updates: int, seq: int, max_entry_tokens: int) -> None:
        grid = (_num_programs(padded_rows, num_updates), 1)
        form(grid, padded_rows, padded_tokens, num_updates, seq, max_entry_tokens)

    return again


def _num_programs(padded_rows: int, num_updates: int) -> int:
    return padded_rows + 1 - (-num_updates // _BLOCK_UPDATES)
