"""Host arithmetic of a step against a walk over its tokens, one at a time."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import layout
from tests.kernels.steps import Step, steps


def walk_slots(step: Step) -> list[int]:
    """The slot of every token, token by token."""
    slots = []
    for row in range(len(step.query_lens)):
        for j in range(int(step.query_lens[row])):
            position = int(step.context_lens[row]) + j
            if position >= step.max_len:
                slots.append(layout.PAD_SLOT)
                continue
            block = int(step.block_tables[row, position // step.block_size])
            slots.append(block * step.block_size + position % step.block_size)
    return slots + [layout.PAD_SLOT] * (step.padded_tokens - len(slots))


@given(steps())
def test_starts_and_positions_equal_a_walk(step: Step) -> None:
    starts, positions, total = [0], [], 0
    for context_len, query_len in zip(step.context_lens.tolist(), step.query_lens.tolist(), strict=True):
        positions += [context_len + j for j in range(query_len)]
        total += query_len
        starts.append(total)
    assert step.query_start_loc.tolist() == starts
    assert step.positions.tolist() == positions
    assert step.query_start_loc.dtype == np.int32
    assert step.positions.dtype == np.int64


@given(steps())
def test_slot_mapping_equals_a_walk(step: Step) -> None:
    slots = layout.make_slot_mapping(
        step.block_tables, step.positions, step.query_start_loc, step.block_size, step.max_len, step.padded_tokens
    )
    assert slots.dtype == np.int64
    assert slots.tolist() == walk_slots(step)


@given(steps())
def test_every_slot_is_the_rows_own_and_inside_its_query(step: Step) -> None:
    slots = layout.make_slot_mapping(
        step.block_tables, step.positions, step.query_start_loc, step.block_size, step.max_len, step.padded_tokens
    )
    live = slots[slots != layout.PAD_SLOT]
    assert len(set(live.tolist())) == len(live)
    for token, row in enumerate(layout.token_rows(step.query_start_loc)):
        if slots[token] == layout.PAD_SLOT:
            continue
        block, offset = divmod(int(slots[token]), step.block_size)
        column = step.block_tables[row].tolist().index(block)
        assert column * step.block_size + offset == step.positions[token] >= step.context_lens[row]


def test_slots_across_a_block_border() -> None:
    tables = np.array([[7, 3, 9, 5]], np.int32)
    slots = layout.make_slot_mapping(tables, np.arange(10, 14), np.array([0, 4], np.int32), 4, 100, 6)
    assert slots.tolist() == [38, 39, 20, 21, -1, -1]


def test_stale_positions_would_hit_live_slots() -> None:
    """What a slot mapping from the drafter's own, stale, positions would do to two rejected tokens."""
    tables = np.array([[7, 3, 9, 5]], np.int32)
    stale = np.array([10, 11, 2, 3])
    assert layout.make_slot_mapping(tables, stale, np.array([0, 4], np.int32), 4, 100, 4).tolist() == [38, 39, 30, 31]


def test_position_at_the_length_limit_is_not_clamped() -> None:
    tables = np.array([[1, 2]], np.int32)
    slots = layout.make_slot_mapping(tables, np.array([6, 7, 8]), np.array([0, 3], np.int32), 4, 8, 3)
    assert slots.tolist() == [10, 11, -1]


def test_positions_past_the_table_and_negative_blocks_are_pad() -> None:
    tables = np.array([[1, -1]], np.int32)
    slots = layout.make_slot_mapping(tables, np.array([3, 4, 8]), np.array([0, 3], np.int32), 4, 100, 3)
    assert slots.tolist() == [7, -1, -1]


def test_no_rows_and_empty_rows() -> None:
    assert layout.make_query_start_loc(np.array([], np.int32)).tolist() == [0]
    assert layout.make_positions(np.array([], np.int32), np.array([], np.int32)).tolist() == []
    none = np.array([0, 0, 0], np.int32)
    slots = layout.make_slot_mapping(np.ones((2, 3), np.int32), np.zeros(0, np.int64), none, 4, 10, 2)
    assert slots.tolist() == [-1, -1]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="padded_tokens"):
        layout.make_slot_mapping(np.ones((1, 1), np.int32), np.arange(3), np.array([0, 3], np.int32), 4, 10, 2)
    with pytest.raises(ValueError, match="query_lens"):
        layout.make_query_start_loc(np.array([2, -1]))


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_blocks_needed_is_the_smallest_that_fits(length: int, block_size: int) -> None:
    blocks = layout.blocks_needed(length, block_size)
    assert (blocks - 1) * block_size < length <= blocks * block_size or (length == 0 and blocks == 0)


def test_layout_needs_no_torch() -> None:
    code = "import sys, kernels.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
