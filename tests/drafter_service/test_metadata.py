"""Is the drafter's own metadata what the worked vectors and the host arithmetic say?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.metadata import MetadataBuilder
from kernels import layout
from kernels.attention.interface import PAD_SLOT

CPU = torch.device("cpu")


def make_builder(**overrides: int) -> MetadataBuilder:
    sizes = {"max_rows": 8, "max_tokens": 64, "max_blocks": 8, "block_size": 4, "max_len": 32, **overrides}
    return MetadataBuilder(**sizes, device=CPU)


def test_slots_come_from_the_global_positions_at_rejected_rows_too() -> None:
    """Block size 4, table [7, 3, 9, 5], positions 10..13 of which 2 are rejected."""
    builder = make_builder()
    tables = torch.tensor([[0] * 8, [7, 3, 9, 5, 0, 0, 0, 0]], dtype=torch.int32)
    starts = np.array([0, 4], dtype=np.int32)
    metadata = builder.build(tables, np.array([1]), starts, np.array([14]), torch.tensor([10, 11, 12, 13]))
    assert metadata.slot_mapping.tolist() == [38, 39, 20, 21]
    # What a drafter's own buffer holds at the two rejected rows: positions of an earlier step. Those slots are live.
    stale = builder.build(tables, np.array([1]), starts, np.array([14]), torch.tensor([10, 11, 2, 3]))
    assert stale.slot_mapping.tolist()[2:] == [30, 31]


def test_padding_is_inert() -> None:
    builder = make_builder()
    tables = torch.arange(1, 65, dtype=torch.int32).view(8, 8)
    positions = torch.tensor([0, 1, 2, 5])
    metadata = builder.build(
        tables, np.array([3, 0]), np.array([0, 3, 4]), np.array([3, 6]), positions, padded_rows=5, padded_tokens=9
    )
    assert metadata.query_start_loc.tolist() == [0, 3, 4, 4, 4, 4]
    assert metadata.seq_lens.tolist() == [3, 6, 0, 0, 0]
    assert metadata.slot_mapping.tolist() == [100, 101, 102, 9, *[PAD_SLOT] * 5]
    assert metadata.query_start_loc_np is not None
    assert metadata.query_start_loc_np.tolist() == [0, 3, 4, 4, 4, 4]
    assert metadata.max_query_len == 3
    assert metadata.max_seq_len == 6


def test_buffers_are_zeroed_and_never_replaced() -> None:
    builder = make_builder()
    names = ["query_start_loc", "seq_lens", "block_tables", "slot_mapping"]
    names += ["step_positions", "step_seq_lens", "step_slots", "step_query_start_loc"]
    before = {name: getattr(builder, name).data_ptr() for name in names}
    assert all(not getattr(builder, name).any() for name in names[:-1])
    tables = torch.ones((2, 8), dtype=torch.int32)
    first = builder.build(tables, np.array([0]), np.array([0, 2]), np.array([2]), torch.tensor([0, 1]))
    builder.begin_draft(torch.tensor([1]), torch.tensor([5]))
    builder.advance(1)
    second = builder.build(tables, np.array([1]), np.array([0, 1]), np.array([3]), torch.tensor([2]))
    assert {name: getattr(builder, name).data_ptr() for name in names} == before
    assert first.slot_mapping.data_ptr() == second.slot_mapping.data_ptr() == before["slot_mapping"]


def test_counters() -> None:
    builder = make_builder()
    tables = torch.ones((2, 8), dtype=torch.int32)
    builder.build(tables, np.array([0]), np.array([0, 2]), np.array([2]), torch.tensor([0, 1]))
    builder.begin_draft(torch.tensor([1]), torch.tensor([5]))
    for _ in range(6):
        builder.advance(1)
    assert (builder.builds, builder.launches) == (1, 2)
    builder.reuse(tables, torch.tensor([4, 5]), np.array([0, 2]), np.array([2]))
    assert (builder.builds, builder.launches) == (1, 2)


def test_reuse_mirrors_what_it_is_given() -> None:
    builder = make_builder()
    tables = torch.tensor([[9, 4, 0]], dtype=torch.int32)
    slots = torch.tensor([38, 39, 16])
    metadata = builder.reuse(tables, slots, np.array([0, 3]), np.array([5]))
    assert metadata.slot_mapping is slots
    assert metadata.block_tables is tables
    builder.begin_draft(torch.tensor([4]), torch.tensor([16]))
    builder.advance(1)
    assert builder.step_slots.tolist()[:1] == [17]


def test_a_row_at_the_length_limit_ends_and_stays_ended() -> None:
    builder = make_builder(max_len=8)
    tables = torch.tensor([[1, 2, 0, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    builder.build(tables, np.array([0, 1]), np.array([0, 1, 2]), np.array([7, 3]), torch.tensor([6, 2]))
    builder.begin_draft(torch.tensor([6, 2]), torch.tensor([10, 14]))
    builder.advance(2)
    assert builder.step_slots.tolist()[:2] == [11, 15]
    builder.advance(2)
    assert builder.step_slots.tolist()[:2] == [PAD_SLOT, 16]
    assert builder.step_seq_lens.tolist()[:2] == [0, 5]
    builder.advance(2)
    assert builder.step_slots.tolist()[:2] == [PAD_SLOT, 17]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_k_advances_equal_the_layout_computed_anew(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 6))
    steps = data.draw(st.integers(0, 6))
    lasts = data.draw(st.lists(st.integers(0, 27), min_size=num_rows, max_size=num_rows))
    tables = torch.randperm(8 * num_rows).to(torch.int32).view(num_rows, 8) + 1
    builder = make_builder()
    seats = np.arange(num_rows)
    starts = np.arange(num_rows + 1)
    builder.build(tables, seats, starts, np.array(lasts) + 1, torch.tensor(lasts))
    builder.begin_draft(torch.tensor(lasts), builder.slot_mapping[:num_rows].clone())
    for _ in range(steps):
        builder.advance(num_rows)
    wanted = np.array(lasts) + steps
    expected = layout.make_slot_mapping(tables.numpy(), wanted, starts, 4, 32, num_rows)
    step = builder.draft_step(num_rows)
    live = wanted < 32
    assert np.array_equal(step.slot_mapping.numpy(), np.where(live, expected, PAD_SLOT))
    assert np.array_equal(step.seq_lens.numpy(), np.where(live, wanted + 1, 0))
    assert step.seq_lens_np is not None
    assert np.array_equal(step.seq_lens_np, step.seq_lens.numpy())


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_unlisted_rows_of_the_buffers_are_left_alone(num_rows: int) -> None:
    builder = make_builder()
    builder.step_slots.fill_(77)
    builder.step_positions.fill_(3)
    builder.begin_draft(torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64))
    builder.advance(num_rows)
    assert builder.step_slots[num_rows:].tolist() == [77] * (8 - num_rows)
    assert builder.step_positions[num_rows:].tolist() == [3] * (8 - num_rows)
