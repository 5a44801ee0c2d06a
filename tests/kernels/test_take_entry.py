"""Does the drafter take over exactly what may be believed of a ring entry?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference.append_anchors import append_anchors
from kernels.reference.finish_reply import finish_reply
from kernels.reference.take_entry import (
    ABSENT,
    CAPACITY,
    FRESH,
    HOLE,
    NO_ROOM,
    NUM_DRAFTS,
    QUERY_LEN,
    RAN,
    SEAT,
    SKIPPED,
    STATUS,
    TOO_LONG,
    UNFOLLOWED,
    WRONG,
    take_entry,
)
from tests.kernels.entries import (
    BLOCK_SIZE,
    EPOCH,
    MAX_LEN,
    NUM_BLOCKS,
    NUM_SEATS,
    SEQ,
    VOCAB,
    Case,
    make_case,
    swapped_tag,
    with_garbage,
)


def take(case: Case) -> Case:
    arguments: tuple[Any, ...] = case.arguments()
    take_entry(*arguments)
    return case


def one_row(context: int = 5, query: int = 3, rejected: int = 1, **plan: int) -> Case:
    """One followed row, seat 2, whose seat holds all of its context."""
    case = make_case(1, num_rows=1)
    entry = case.entry
    entry.header[3] = query
    entry.query_start_loc[:2] = torch.tensor([0, query])
    entry.seq_lens[0], entry.num_rejected[0], entry.anchors[0] = context + query, rejected, 11
    entry.next_prompt_tokens[0] = -1
    entry.positions[:query] = torch.arange(context, context + query)
    entry.input_ids[:query] = torch.arange(20, 20 + query)
    values = [2, query, 30, 60, 4, 0, 0, 0, 0]
    for name, value in plan.items():
        values[{"capacity": CAPACITY, "seat": SEAT, "fresh": FRESH, "query_len": QUERY_LEN}[name]] = value
    case.plan = torch.tensor(values, dtype=torch.int32)[:, None]
    case.state[:, 2] = torch.tensor([2, context])
    records = torch.zeros((3, 8), dtype=torch.int64)
    case.taken = type(case.taken).zeros(3, 9, torch.device("cpu"), records).sized(3, 9)
    case.max_entry_tokens = 9
    return case


def status_of(case: Case, row: int = 0) -> int:
    return int(case.taken.records[row, STATUS])


def test_a_right_row_becomes_the_drafter_s_own() -> None:
    taken = take(one_row()).taken
    assert taken.query_start_loc.tolist() == [0, 3, 3, 3]
    assert taken.seats.tolist() == [2, -1, -1]
    # Positions 5, 6, 7 of the target, and the seat starts at 2.
    assert taken.positions.tolist() == [3, 4, 5, 0, 0, 0, 0, 0, 0]
    assert taken.input_ids.tolist() == [20, 21, 22, 0, 0, 0, 0, 0, 0]
    assert taken.seq_lens.tolist() == [6, 0, 0]
    assert taken.num_drafts.tolist() == [4, 0, 0]
    assert (taken.step_positions.tolist(), taken.step_seq_lens.tolist()) == ([4, 0, 0], [5, 0, 0])
    assert taken.anchor_positions.tolist() == [7, 0, 0]
    assert taken.records[0].tolist() == [RAN, 5, 0, 3, 1, 11, 2, 4]


@pytest.mark.parametrize(("word", "value"), [(0, SEQ + 4), (0, 0), (1, EPOCH + 1), (2, 2), (3, 2), (3, -1), (3, 10)])
def test_another_tag_is_an_absent_entry(word: int, value: int) -> None:
    case = take(swapped_tag(one_row(), word, value))
    assert status_of(case) == ABSENT
    assert case.taken.seats.tolist() == [-1, -1, -1]
    assert case.taken.query_start_loc.tolist() == [0, 0, 0, 0]
    assert case.state[:, 2].tolist() == [2, 5]


@pytest.mark.parametrize(
    ("name", "index", "value", "status"),
    [
        ("query_start_loc", 0, 1, ABSENT),
        ("query_start_loc", 1, 4, ABSENT),
        ("seq_lens", 0, 2, WRONG),
        ("seq_lens", 0, 2**31 - 1, WRONG),
        ("num_rejected", 0, 3, WRONG),
        ("num_rejected", 0, -1, WRONG),
        ("anchors", 0, VOCAB, WRONG),
        ("anchors", 0, -2, WRONG),
        ("next_prompt_tokens", 0, VOCAB, WRONG),
        ("input_ids", 2, VOCAB, WRONG),
        ("input_ids", 0, -1, WRONG),
        ("positions", 1, 7, WRONG),
    ],
)
def test_numbers_that_make_no_sense(name: str, index: int, value: int, status: int) -> None:
    case = one_row()
    getattr(case.entry, name)[index] = value
    take(case)
    assert status_of(case) == status
    assert case.taken.seats.tolist() == [-1, -1, -1]
    assert case.taken.num_drafts.tolist() == [0, 0, 0]


def test_why_a_row_does_not_run() -> None:
    assert status_of(take(one_row(seat=-1))) == UNFOLLOWED
    assert status_of(take(one_row(query_len=2))) == WRONG  # more tokens than the plan has
    assert status_of(take(one_row(capacity=5))) == NO_ROOM
    assert status_of(take(one_row(capacity=6))) == RAN
    case = one_row(context=MAX_LEN, capacity=100)
    assert status_of(take(case)) == TOO_LONG
    case = one_row()
    case.state[1, 2] = 4  # of the five tokens of context
    assert status_of(take(case)) == HOLE
    case = one_row()
    case.state[0, 2] = 6
    assert status_of(take(case)) == HOLE
    case = one_row()
    case.entry.header[3], case.entry.query_start_loc[1], case.entry.num_rejected[0] = 0, 0, 0
    assert status_of(take(case)) == SKIPPED


def test_a_fresh_seat_begins_whatever_becomes_of_the_entry() -> None:
    for case, status in ((one_row(fresh=1), HOLE), (swapped_tag(one_row(fresh=1), 0, 1), ABSENT)):
        case.plan[6:8, 0] = torch.tensor([0, 3], dtype=torch.int32)
        take(case)
        assert status_of(case) == status
        assert case.state[:, 2].tolist() == [0, 3]
    case = one_row(fresh=1)
    case.plan[6:8, 0] = torch.tensor([-1, 0], dtype=torch.int32)
    take(case)
    assert status_of(case) == RAN
    assert case.taken.positions.tolist()[:3] == [0, 1, 2]  # its first row is where it starts
    assert case.state[:, 2].tolist() == [-1, 0], "it has begun only when the entry is known to be whole"


def test_drafts_end_at_every_limit() -> None:
    def drafts(**changes: int) -> int:
        case = one_row()
        case.plan[:, 0] = torch.tensor([2, 3, 30, 60, 4, 0, 0, 0, 0], dtype=torch.int32)
        for name, value in changes.items():
            case.plan[{"capacity": 2, "longest": 3, "wanted": 4}[name], 0] = value
        return int(take(case).taken.records[0, NUM_DRAFTS])

    assert drafts() == 4
    assert drafts(wanted=0) == 0
    assert drafts(longest=11) == 2  # 8 tokens are there, two drafts and the target's own make 11
    assert drafts(longest=9) == 0
    assert drafts(capacity=6) == 2  # positions 5 of 6: the last draft's own KV is never written
    case = one_row()
    case.entry.anchors[0], case.entry.next_prompt_tokens[0] = -1, 8
    assert int(take(case).taken.records[0, NUM_DRAFTS]) == 0


def test_the_target_s_layout_is_mirrored_where_it_is_legal() -> None:
    case = make_case(3, with_layout=True, num_rows=4)
    case.entry.slot_mapping[:2] = torch.tensor([NUM_BLOCKS * BLOCK_SIZE, -9])
    case.entry.block_tables[0, 1] = NUM_BLOCKS
    take(case)
    assert case.layout is not None
    slots = case.layout.slots
    assert int(slots.max()) < NUM_BLOCKS * BLOCK_SIZE
    assert int(slots.min()) >= -1
    assert int(case.layout.block_tables.max()) < NUM_BLOCKS
    seats, starts = case.taken.seats.tolist(), case.taken.query_start_loc.tolist()
    for row, seat in enumerate(seats):
        own = slots[starts[row] : starts[row + 1]]
        given = case.entry.slot_mapping[starts[row] : starts[row + 1]].tolist()
        legal = [slot if 0 <= slot < NUM_BLOCKS * BLOCK_SIZE else -1 for slot in given]
        assert own.tolist() == ([-1] * len(own) if seat < 0 else legal)


@pytest.mark.parametrize("seed", range(300))
def test_garbage_never_leads_outside(seed: int) -> None:
    case = take(with_garbage(make_case(seed, with_layout=seed % 3 == 0), seed))
    taken = case.taken
    starts = taken.query_start_loc
    assert bool((starts[1:] >= starts[:-1]).all())
    assert int(starts[0]) == 0
    assert int(starts[-1]) <= taken.positions.shape[0]
    assert bool(((taken.seats >= -1) & (taken.seats < NUM_SEATS)).all())
    assert bool(((taken.input_ids >= 0) & (taken.input_ids < VOCAB)).all())
    assert bool(((taken.positions >= 0) & (taken.positions <= MAX_LEN)).all())
    assert bool(((taken.step_positions >= 0) & (taken.step_positions < MAX_LEN)).all())
    assert bool(((taken.step_seq_lens >= 0) & (taken.step_seq_lens <= taken.seq_lens)).all())
    assert bool(((taken.seq_lens >= 0) & (taken.seq_lens <= MAX_LEN)).all())
    assert bool(((taken.num_drafts >= 0) & (taken.num_drafts < 6)).all())
    assert bool(((taken.anchors >= -1) & (taken.anchors < VOCAB)).all())
    assert bool(torch.isfinite(taken.temperatures).all())


def finish(case: Case, drafts: torch.Tensor, entry_header: torch.Tensor, width: int = 4) -> torch.Tensor:
    tokens = torch.full((6, width), 99)
    num_rows = case.plan.shape[1]
    header = torch.zeros(8, dtype=torch.int64)
    finish_reply(entry_header, SEQ, EPOCH, num_rows, drafts, case.taken, case.state, header, tokens, None)
    assert header[:4].tolist() == [SEQ, EPOCH, num_rows, 0]
    assert bool((tokens[num_rows:] == 99).all())
    return tokens[:num_rows]


def test_the_reply_holds_each_row_s_drafts_and_the_seat_moves_on() -> None:
    case = take(one_row())
    case.taken.num_drafts[0] = 2
    case.taken.step_positions[0] += 3  # the draft steps have moved it
    drafts = torch.tensor([[31, 32, 33]])
    assert finish(case, drafts, case.entry.header).tolist() == [[31, 32, -1, -1]]
    assert case.state[:, 2].tolist() == [2, 7]
    assert status_of(case) == RAN


def test_an_entry_overwritten_meanwhile_counts_for_nothing() -> None:
    case = take(one_row())
    before = case.state.clone()
    overwritten = case.entry.header.clone()
    overwritten[0] = 0
    assert finish(case, torch.tensor([[31, 32, 33]]), overwritten).tolist() == [[-1, -1, -1, -1]]
    assert torch.equal(case.state, before)
    assert status_of(case) == ABSENT


def test_anchors_follow_what_was_accepted() -> None:
    case = one_row()
    case.state[0, 2] = 0
    taken = take(case).taken
    starts, lens = torch.full((4,), 9, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    ids, positions, last = torch.full((12,), 9), torch.full((12,), 9), torch.full((3,), 9, dtype=torch.int32)
    append_anchors(taken, starts, lens, ids, positions, last)
    # Three tokens at 5, 6, 7, the last one rejected; the anchor 11 takes its place.
    assert starts.tolist() == [0, 4, 5, 6]
    assert ids.tolist() == [20, 21, 11] + [0] * 9
    assert positions.tolist() == [5, 6, 7] + [-1] * 9
    assert (lens.tolist(), last.tolist()) == ([9, 0, 0], [2, 4, 5])
    assert (taken.step_positions.tolist(), taken.step_seq_lens.tolist()) == ([7, 0, 0], [8, 0, 0])
