"""How does the drafter take a ring entry over on the device, without believing a number in it?

The host has enqueued this before the entry exists: it knows the plan, not the lengths. A row runs when the entry's tag
is right (before and after it was read), its numbers agree with each other and with the plan, it follows on what the
seat's draft KV holds, and there is room for it. Every other row becomes a padded one, and its record says why. Nothing
that a peer wrote is ever used as an index unchecked.

Positions become the drafter's own: relative to the seat's `start` (0 for a request followed from its first token).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels.layout import PAD_SLOT
from kernels.reference.slot_mapping import token_rows

# Rows of `plan` [PLAN_FIELDS, R] int32, what the host says of each row of the entry. SEAT: -1, not followed. QUERY_LEN:
# the most tokens it may have. CAPACITY: drafter positions there is room for. MAX_TOTAL_LEN: of the request, in target
# positions. DRAFT_LEN: drafts wanted. FRESH: the seat's state begins with START (-1: where its first row does) and
# COMPUTED. SAMPLES: its drafts are drawn, at the entry's temperature, where that is above 0.
SEAT, QUERY_LEN, CAPACITY, MAX_TOTAL_LEN, DRAFT_LEN, FRESH, START, COMPUTED, SAMPLES = range(9)
PLAN_FIELDS = 9

# Columns of `records` [R, RECORD_FIELDS] int64, what the host learns of each row. What follows STATUS means something
# where the row has run; positions are the target's.
STATUS, CONTEXT_LEN, QUERY_START, NUM_QUERIES, NUM_REJECTED, ANCHOR, FIRST_POSITION, NUM_DRAFTS = range(8)
RECORD_FIELDS = 8

# Values of STATUS. UNFOLLOWED: no seat. ABSENT: the entry's tag is another, or its shape is nonsense. SKIPPED: the
# target did not run the row. WRONG: its numbers make no sense. HOLE: tokens before it were missed. TOO_LONG: past the
# drafter's length. NO_ROOM: past the row's capacity.
UNFOLLOWED, RAN, ABSENT, SKIPPED, WRONG, HOLE, TOO_LONG, NO_ROOM = range(8)

# Header words, as engine/channel/layout.py has them.
HEADER_SEQ, HEADER_EPOCH, HEADER_ROWS, HEADER_TOKENS = range(4)


@dataclass(frozen=True, slots=True)
class EntryTensors:
    """A ring entry as a peer wrote it, at full size (M rows, N tokens); dtypes as in the channel's RingEntry.

    header: [8] int64, `[seq, epoch, num_rows, num_tokens, ...]`.
    """

    header: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    anchors: torch.Tensor
    next_prompt_tokens: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows as the drafter runs them: buffers made once, Rp rows and Tp tokens of them in use.

    query_start_loc: [Rp + 1] int32, flat behind the entry's rows. seats: [Rp] int32, -1: does not run. seq_lens: [Rp]
    int32, drafter positions, 0 where it does not run. num_rejected: [Rp] int32. anchors, next_prompt_tokens: [Rp]
    int64, -1 for none. positions: [Tp] int64, the drafter's; input_ids: [Tp] int64, legal ids. step_positions: [Rp]
    int64, of the row's last valid token; step_seq_lens: [Rp] int32, up to it, 0 for rows that draft nothing.
    num_drafts: [Rp] int32. anchor_positions: [Rp] int64, the target's. temperatures: [Rp] float32, 0: greedy; seeds:
    [Rp] int64. records: [>= R, RECORD_FIELDS] int64.
    """

    query_start_loc: torch.Tensor
    seats: torch.Tensor
    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    anchors: torch.Tensor
    next_prompt_tokens: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    step_positions: torch.Tensor
    step_seq_lens: torch.Tensor
    num_drafts: torch.Tensor
    anchor_positions: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    records: torch.Tensor

    @classmethod
    def zeros(cls, max_rows: int, max_tokens: int, device: torch.device, records: torch.Tensor) -> TakenRows:
        """Buffers for steps of up to max_rows rows and max_tokens tokens. records: [max_rows, RECORD_FIELDS] int64."""

        def of(num: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num, dtype=dtype, device=device)

        int32, int64 = torch.int32, torch.int64
        return cls(
            query_start_loc=of(max_rows + 1, int32),
            seats=of(max_rows, int32),
            seq_lens=of(max_rows, int32),
            num_rejected=of(max_rows, int32),
            anchors=of(max_rows, int64),
            next_prompt_tokens=of(max_rows, int64),
            positions=of(max_tokens, int64),
            input_ids=of(max_tokens, int64),
            step_positions=of(max_rows, int64),
            step_seq_lens=of(max_rows, int32),
            num_drafts=of(max_rows, int32),
            anchor_positions=of(max_rows, int64),
            temperatures=of(max_rows, torch.float32),
            seeds=of(max_rows, int64),
            records=records,
        )

    def sized(self, num_rows: int, num_tokens: int) -> TakenRows:
        """Views of the first num_rows rows and num_tokens tokens."""
        by_token = ("positions", "input_ids")
        views = {field.name: getattr(self, field.name)[:num_rows] for field in fields(self)}
        views |= {name: getattr(self, name)[:num_tokens] for name in by_token}
        views["query_start_loc"] = self.query_start_loc[: num_rows + 1]
        return TakenRows(**views)


@dataclass(frozen=True, slots=True)
class TakenLayout:
    """The target's own layout, mirrored for `reuse`. slots: [Tp] int64; block_tables: [Rp, B] int32; num_blocks: of the
    drafter's cache, above every block id that is let through; block_size: tokens.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    num_blocks: int
    block_size: int

    def sized(self, num_rows: int, num_tokens: int) -> TakenLayout:
        """Views of the first num_rows rows and num_tokens tokens."""
        return TakenLayout(self.slots[:num_tokens], self.block_tables[:num_rows], self.num_blocks, self.block_size)


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
) -> None:
    """Take step `seq`'s entry over into `taken` (sized to Rp rows, Tp tokens), every element of it written.

    plan: [PLAN_FIELDS, R] int32, R <= Rp. table_updates: [2, U] int32, flat indices into seat_tables and the block ids
    to put there, before anything reads the tables. max_entry_tokens: the most tokens that the entry may have, at most
    Tp and the entry's own size. vocab_size, max_len: ids and drafter positions end there. seat_state: [2, S] int32,
    each seat's start (-1: not begun) and how many target positions have draft KV; FRESH rows begin it here, everything
    else is left to `finish_reply`. seat_tables: [S, B] int32. reply_header: [8] int64, of the reply to this step: its
    seq is zeroed, as it is going to be written. layout: where to mirror the target's slots and tables to, or None; a
    row's capacity is then what its table holds.
    """
    num_rows, padded_tokens = plan.shape[1], taken.positions.shape[0]
    device = plan.device
    reply_header[HEADER_SEQ] = 0
    _update_tables(seat_tables, table_updates)
    columns = plan.to(torch.int64)
    seats = columns[SEAT]
    followed = seats >= 0
    seat_index = seats.clamp(min=0)
    fresh = followed & (columns[FRESH] != 0)
    start = torch.where(fresh, columns[START], torch.where(followed, seat_state[0, seat_index], 0))
    computed = torch.where(fresh, columns[COMPUTED], torch.where(followed, seat_state[1, seat_index], 0))
    _begin_seats(seat_state, seat_index, fresh, start, computed)

    header = entry.header
    num_tokens = header[HEADER_TOKENS]
    starts = entry.query_start_loc[: num_rows + 1].to(torch.int64)
    present = (
        (header[HEADER_SEQ] == seq)
        & (header[HEADER_EPOCH] == epoch)
        & (header[HEADER_ROWS] == num_rows)
        & (num_tokens >= 0)
        & (num_tokens <= max_entry_tokens)
        & (starts[0] == 0)
        & (starts[-1] == num_tokens)
        & (starts[1:] >= starts[:-1]).all()
    )
    starts = torch.where(present, starts, 0)
    query_lens = starts[1:] - starts[:-1]
    seq_lens = entry.seq_lens[:num_rows].to(torch.int64)
    context_lens = seq_lens - query_lens
    rejected = entry.num_rejected[:num_rows].to(torch.int64)
    anchors, following = entry.anchors[:num_rows], entry.next_prompt_tokens[:num_rows]
    begins = start < 0
    start = torch.where(begins, context_lens, start)
    computed = torch.where(begins, context_lens, computed)

    taken.query_start_loc[: num_rows + 1] = starts
    taken.query_start_loc[num_rows + 1 :] = starts[-1]
    taken.positions.zero_()
    taken.input_ids.zero_()
    wrong = (
        (context_lens < 0)
        | (query_lens > columns[QUERY_LEN])
        | (rejected < 0)
        | (rejected >= query_lens)
        | (anchors < -1)
        | (anchors >= vocab_size)
        | (following < -1)
        | (following >= vocab_size)
    )
    capacity = columns[CAPACITY]
    if layout is not None:
        capacity = _mirror_tables(entry.block_tables[:num_rows], layout)
        layout.slots.fill_(PAD_SLOT)
    tokens = torch.arange(min(padded_tokens, max_entry_tokens), device=device)
    if num_rows and tokens.shape[0]:
        rows = token_rows(starts.to(torch.int32), tokens.shape[0])
        real = tokens < starts[-1]
        expected = context_lens[rows] + tokens - starts[rows]
        ids = entry.input_ids[: tokens.shape[0]]
        bad = real & ((entry.positions[: tokens.shape[0]] != expected) | (ids < 0) | (ids >= vocab_size))
        num_bad = torch.zeros(num_rows, dtype=torch.int64, device=device).index_add_(0, rows, bad.to(torch.int64))
        wrong = wrong | (num_bad > 0)
        taken.positions[: tokens.shape[0]] = torch.where(real, (expected - start[rows]).clamp(0, max_len), 0)
        taken.input_ids[: tokens.shape[0]] = torch.where(real, ids.clamp(0, vocab_size - 1), 0)

    ends = context_lens + query_lens - start
    status = torch.full((num_rows,), RAN, dtype=torch.int64, device=device)
    for condition, value in (
        (ends > capacity, NO_ROOM),
        (ends > max_len, TOO_LONG),
        ((context_lens < start) | (context_lens > computed), HOLE),
        (wrong, WRONG),
        (query_lens == 0, SKIPPED),
        (~present | (header[HEADER_SEQ] != seq), ABSENT),
        (~followed, UNFOLLOWED),
    ):
        status = torch.where(condition, value, status)
    runs = status == RAN
    committed = context_lens + query_lens - rejected
    room = torch.minimum(capacity, torch.full_like(capacity, max_len)) - (committed - start) + 1
    drafts = torch.minimum(columns[DRAFT_LEN], columns[MAX_TOTAL_LEN] - committed - 2)
    drafts = torch.where(runs & (anchors >= 0), torch.minimum(drafts, room).clamp(min=0), 0)
    temperatures = entry.temperatures[:num_rows]
    drawn = runs & (columns[SAMPLES] != 0) & (temperatures > 0) & (temperatures < float("inf"))

    def put(out: torch.Tensor, values: torch.Tensor, rest: int) -> None:
        out[:num_rows] = torch.where(runs, values, rest)
        out[num_rows:] = rest

    put(taken.seats, seats, -1)
    put(taken.seq_lens, ends, 0)
    put(taken.num_rejected, rejected, 0)
    put(taken.anchors, anchors, -1)
    put(taken.next_prompt_tokens, following, -1)
    put(taken.step_positions, committed - start - 1, 0)
    put(taken.step_seq_lens, torch.where(drafts > 0, committed - start, 0), 0)
    put(taken.num_drafts, drafts, 0)
    put(taken.anchor_positions, committed, 0)
    put(taken.seeds, entry.seeds[:num_rows], 0)
    taken.temperatures[:num_rows] = torch.where(drawn, temperatures, 0.0)
    taken.temperatures[num_rows:] = 0.0
    parts = (status, context_lens, starts[:-1], query_lens, rejected, anchors, start, drafts)
    taken.records[:num_rows] = torch.stack(parts, dim=1)
    if layout is not None and num_rows and tokens.shape[0]:
        slots = entry.slot_mapping[: tokens.shape[0]]
        legal = real & runs[rows] & (slots >= 0) & (slots < layout.num_blocks * layout.block_size)
        layout.slots[: tokens.shape[0]] = torch.where(legal, slots, PAD_SLOT)


def _update_tables(seat_tables: torch.Tensor, updates: torch.Tensor) -> None:
    seat_tables.view(-1).scatter_(0, updates[0].to(torch.int64), updates[1])


def _begin_seats(
    seat_state: torch.Tensor, seats: torch.Tensor, fresh: torch.Tensor, start: torch.Tensor, computed: torch.Tensor
) -> None:
    """Write the state of fresh rows' seats; followed seats are distinct, the others write nothing."""
    last = seat_state.shape[1]
    # One more column takes what is not to be written: no row has to be counted on the host.
    padded = torch.cat((seat_state, torch.zeros_like(seat_state[:, :1])), dim=1)
    where = torch.where(fresh, seats, last)
    padded[0].scatter_(0, where, start.to(padded.dtype))
    padded[1].scatter_(0, where, computed.to(padded.dtype))
    seat_state.copy_(padded[:, :last])


def _mirror_tables(tables: torch.Tensor, layout: TakenLayout) -> torch.Tensor:
    """Copy the target's tables. Returns the tokens that each row's leading blocks hold: [R] int64."""
    num_rows, width = tables.shape[0], min(tables.shape[1], layout.block_tables.shape[1])
    legal = torch.where((tables >= 0) & (tables < layout.num_blocks), tables, 0)[:, :width]
    layout.block_tables.zero_()
    layout.block_tables[:num_rows, :width] = legal
    held = (legal != 0).to(torch.int64).cumprod(dim=1).sum(dim=1)
    return held * layout.block_size
