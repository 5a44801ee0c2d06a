"""Device metadata kernels against token-by-token walks and against their host twins, into poisoned outputs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import layout
from kernels.reference.advance import advance_draft_step
from kernels.reference.prefill_inputs import prepare_prefill_inputs
from kernels.reference.slot_mapping import compute_slot_mapping
from kernels.reference.target_inputs import commit_verdict, prepare_target_inputs
from tests.kernels.steps import POISON, Step, poisoned, steps, tensor
from tests.kernels.test_layout import walk_slots


@given(steps())
def test_slot_mapping_equals_the_walk_and_the_twin(step: Step) -> None:
    out = poisoned(step.padded_tokens)
    # A captured graph hands over its whole position buffer; past the real tokens it holds whatever an older step left.
    positions = torch.cat((tensor(step.positions), torch.full((step.padded_tokens - step.num_tokens,), 2)))
    compute_slot_mapping(
        positions, tensor(step.query_start_loc), tensor(step.block_tables), step.block_size, step.max_len, out
    )
    assert out.tolist() == walk_slots(step)


def test_slot_mapping_of_the_worked_vector() -> None:
    out = poisoned(6)
    tables = torch.tensor([[7, 3, 9, 5]], dtype=torch.int32)
    compute_slot_mapping(torch.arange(10, 14), torch.tensor([0, 4], dtype=torch.int32), tables, 4, 100, out)
    assert out.tolist() == [38, 39, 20, 21, -1, -1]


def test_slot_mapping_of_nothing() -> None:
    out = poisoned(3)
    empty = torch.zeros(0, dtype=torch.int64)
    compute_slot_mapping(empty, torch.tensor([0], dtype=torch.int32), torch.zeros((0, 4), dtype=torch.int32), 4, 9, out)
    assert out.tolist() == [-1, -1, -1]
    compute_slot_mapping(
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int32),
        torch.ones((2, 4), dtype=torch.int32),
        4,
        9,
        out.fill_(POISON),
    )
    assert out.tolist() == [-1, -1, -1]


@given(steps(), st.data())
def test_prefill_inputs_equal_a_walk_and_the_twin(step: Step, data: st.DataObject) -> None:
    rows = len(step.query_lens)
    ids = np.arange(100, 100 + step.padded_tokens, dtype=np.int64)
    rejected = np.array([data.draw(st.integers(0, max(0, n - 1))) for n in step.query_lens.tolist()], np.int32)
    anchors = np.array(data.draw(st.lists(st.sampled_from([-1, 7, 8]), min_size=rows, max_size=rows)), np.int64)
    following = np.array(data.draw(st.lists(st.sampled_from([-1, 5, 6]), min_size=rows, max_size=rows)), np.int64)
    starts = step.query_start_loc

    expected, last = [], []
    for row in range(rows):
        own = ids[starts[row] : starts[row + 1]].tolist()
        if not own:
            last.append(-1)
            continue
        kept = len(own) - int(rejected[row])
        last.append(int(starts[row]) + kept - 1)
        after = next(i for i in (int(anchors[row]), int(following[row]), 0) if i >= 0)
        shifted = [*own[1:], own[-1]]
        shifted[kept - 1] = after
        expected += shifted
    expected += [0] * (step.padded_tokens - step.num_tokens)

    out_ids, out_last = poisoned(step.padded_tokens), poisoned(rows, dtype=torch.int32)
    prepare_prefill_inputs(
        tensor(ids), tensor(starts), tensor(rejected), tensor(anchors), tensor(following), out_ids, out_last
    )
    assert out_ids.tolist() == expected
    assert out_last.tolist() == last
    twin_ids, twin_last = layout.make_prefill_inputs(ids, starts, rejected, anchors, following, step.padded_tokens)
    assert twin_ids.tolist() == expected
    assert twin_last.tolist() == last


def test_prefill_inputs_of_a_mixed_step() -> None:
    """A chunk in mid-prefill, a verify row with two of three drafts rejected, a row that does not run, a last chunk."""
    ids = torch.tensor([10, 11, 12, 20, 21, 22, 23, 30, 31])
    out_ids, out_last = poisoned(10), poisoned(4, dtype=torch.int32)
    prepare_prefill_inputs(
        ids,
        torch.tensor([0, 3, 7, 7, 9], dtype=torch.int32),
        torch.tensor([0, 2, 0, 0], dtype=torch.int32),
        torch.tensor([-1, 99, -1, 98]),
        torch.tensor([13, -1, -1, -1]),
        out_ids,
        out_last,
    )
    assert out_ids.tolist() == [11, 12, 13, 21, 99, 23, 23, 31, 98, 0]
    assert out_last.tolist() == [2, 4, -1, 8]


@given(steps(), st.integers(1, 5), st.data())
def test_k_advances_equal_the_layout_recomputed(step: Step, draft_len: int, data: st.DataObject) -> None:
    """K device advances, K host advances, and the layout of each draft step from scratch, with ragged draft lengths."""
    rows = len(step.query_lens)
    lens = data.draw(st.lists(st.integers(0, draft_len), min_size=rows, max_size=rows))
    # The first draft step runs on a row's last committed token.
    first = np.maximum(step.context_lens.astype(np.int64) + step.query_lens - 1, 0)
    room = step.block_tables.shape[1] * step.block_size
    limit = min(step.max_len, room)
    alive = [lens[row] > 0 and first[row] < limit for row in range(rows)]
    seq_lens = np.where(alive, first + 1, 0).astype(np.int32)
    slots = np.where(
        alive, layout.slots_of(step.block_tables, np.arange(rows), first, step.block_size, limit), layout.PAD_SLOT
    )
    host = (first.copy(), seq_lens.copy(), slots.copy())
    device = (tensor(first), tensor(seq_lens), tensor(slots))

    for number in range(1, draft_len + 1):
        active = np.array([number < n for n in lens])
        layout.advance_draft_step(*host, step.block_tables, step.block_size, limit, active)
        advance_draft_step(*device, tensor(step.block_tables), step.block_size, limit, tensor(active))
        for row in range(rows):
            position = int(first[row]) + number
            if alive[row] and number < lens[row] and position < limit:
                block = int(step.block_tables[row, position // step.block_size])
                expected = (position, position + 1, block * step.block_size + position % step.block_size)
            else:
                # Ended: the position stays where it was, a legal index.
                expected = (int(host[0][row]), 0, layout.PAD_SLOT)
                assert int(host[0][row]) < max(limit, int(first[row]) + 1)
            assert tuple(int(part[row]) for part in host) == expected
            assert tuple(int(part[row]) for part in device) == expected


def test_advance_at_the_length_limit_ends_that_row_alone() -> None:
    tables = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    positions = torch.tensor([6, 2, 0])
    seq_lens = torch.tensor([7, 3, 0], dtype=torch.int32)
    slots = torch.tensor([10, 14, -1])
    seen = []
    for _ in range(3):
        advance_draft_step(positions, seq_lens, slots, tables, 4, 8, None)
        seen.append((positions.tolist(), seq_lens.tolist(), slots.tolist()))
    assert seen == [
        ([7, 3, 0], [8, 4, 0], [11, 15, -1]),
        ([7, 4, 0], [0, 5, 0], [-1, 16, -1]),
        ([7, 5, 0], [0, 6, 0], [-1, 17, -1]),
    ]


@given(steps(), st.data())
def test_target_inputs_equal_a_walk_and_the_twin(step: Step, data: st.DataObject) -> None:
    rows, width = len(step.query_lens), data.draw(st.integers(0, 7))
    num_seats = rows + 2
    seats = np.array(data.draw(st.permutations(range(num_seats)))[:rows], np.int32)
    context_lens = np.full(num_seats, POISON, np.int32)
    context_lens[seats] = step.context_lens
    anchors = np.arange(1000, 1000 + num_seats, dtype=np.int64)
    is_prompt = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    drafts = np.array(
        data.draw(st.lists(st.lists(st.integers(-1, 9), min_size=width, max_size=width), min_size=rows, max_size=rows)),
        np.int64,
    ).reshape(rows, width)
    # Chunks lie in the prompt buffer in row order, behind some tokens that no row of this step runs.
    prompt_starts, begin = [], 3
    for row in range(rows):
        prompt_starts.append(begin)
        begin += int(step.query_lens[row]) if is_prompt[row] else 0
    prompt = np.arange(2000, 2000 + begin, dtype=np.int64)

    ids, positions = [], []
    for row in range(rows):
        for j in range(int(step.query_lens[row])):
            positions.append(int(step.context_lens[row]) + j)
            if is_prompt[row]:
                ids.append(int(prompt[prompt_starts[row] + j]))
            elif j == 0:
                ids.append(int(anchors[seats[row]]))
            else:
                ids.append(max(0, int(drafts[row, j - 1])) if j <= width else 0)
    padding = [0] * (step.padded_tokens - step.num_tokens)

    starts = np.array(prompt_starts, np.int32)
    out_ids, out_positions = poisoned(step.padded_tokens), poisoned(step.padded_tokens)
    prepare_target_inputs(
        tensor(context_lens),
        tensor(anchors),
        tensor(seats),
        tensor(prompt),
        tensor(starts),
        tensor(drafts),
        tensor(step.query_start_loc),
        tensor(is_prompt),
        out_ids,
        out_positions,
    )
    assert out_ids.tolist() == ids + padding
    assert out_positions.tolist() == positions + padding
    twin_ids, twin_positions = layout.make_target_inputs(
        context_lens, anchors, seats, prompt, starts, drafts, step.query_start_loc, is_prompt, step.padded_tokens
    )
    assert twin_ids.tolist() == ids + padding
    assert twin_positions.tolist() == positions + padding


@given(steps(), st.data())
def test_commit_changes_the_seats_that_ran_and_no_other(step: Step, data: st.DataObject) -> None:
    rows = len(step.query_lens)
    num_seats = rows + 2
    seats = np.array(data.draw(st.permutations(range(num_seats)))[:rows], np.int32)
    seats[np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))] = -1
    rejected = np.array([data.draw(st.integers(0, max(0, n - 1))) for n in step.query_lens.tolist()], np.int32)
    sampled = np.array([data.draw(st.integers(0, n)) for n in step.query_lens.tolist()], np.int32)
    last = np.arange(50, 50 + rows, dtype=np.int64)
    context_lens = np.arange(10, 10 + num_seats, dtype=np.int32)
    anchors = np.arange(900, 900 + num_seats, dtype=np.int64)

    expected_lens, expected_anchors = context_lens.tolist(), anchors.tolist()
    for row in range(rows):
        if seats[row] >= 0 and step.query_lens[row] > 0:
            expected_lens[seats[row]] += int(step.query_lens[row]) - int(rejected[row])
            if sampled[row]:
                expected_anchors[seats[row]] = int(last[row])

    args = (seats, step.query_lens, rejected, sampled, last)
    device_lens, device_anchors = tensor(context_lens), tensor(anchors)
    commit_verdict(device_lens, device_anchors, *(tensor(a) for a in args))
    assert device_lens.tolist() == expected_lens
    assert device_anchors.tolist() == expected_anchors
    layout.commit_verdict(context_lens, anchors, *args)
    assert context_lens.tolist() == expected_lens
    assert anchors.tolist() == expected_anchors
