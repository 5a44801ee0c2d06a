"""Device metadata kernels: every output element equal to the reference's, into poisoned buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import layout
from kernels.reference import advance as plain_advance
from kernels.reference import metadata_fill as plain_fill
from kernels.reference import prefill_inputs as plain_prefill
from kernels.reference import slot_mapping as plain_slots
from kernels.reference import target_inputs as plain_target
from kernels.triton import advance, metadata_fill, prefill_inputs, slot_mapping, target_inputs
from tests.kernels.steps import tensor
from tests.kernels.triton.device import DEVICE, MANY, POISON, call, poisoned, there

# (context_lens, query_lens, block_size, max_len, table width, padded tokens)
STEPS: list[tuple[list[int], list[int], int, int, int, int]] = [
    ([10], [4], 4, 100, 4, 6),
    ([0, 5, 9, 2], [3, 0, 5, 1], 4, 12, 4, 3),  # an empty row, and one that runs past the limit
    ([7, 0, 300], [1, 140, 2], 16, 4096, 19, 0),  # a chunk of more than one block of tokens
    ([3, 8], [2, 6], 3, 1000, 2, 2),  # a table too narrow
    ([5, 6], [0, 0], 4, 50, 3, 3),
    ([1], [1], 1, 2, 2, 0),
]
IDS = ["worked vector", "ragged", "long chunk", "narrow table", "nothing runs", "one token"]


class Batch:
    """One case's arrays, on the CPU; tables hold distinct blocks."""

    def __init__(self, case: tuple[list[int], list[int], int, int, int, int], seed: int = 0) -> None:
        context, query, self.block_size, self.max_len, width, padding = case
        self.context = np.array(context, np.int32)
        self.query = np.array(query, np.int32)
        self.num_rows = len(context)
        self.starts = layout.make_query_start_loc(self.query)
        self.num_tokens = int(self.starts[-1])
        self.padded = self.num_tokens + padding
        # A captured graph hands over its whole position buffer: what lies behind the real tokens is stale.
        stale = np.full(padding, 2, np.int64)
        self.positions = np.concatenate((layout.make_positions(self.context, self.query), stale))
        blocks = np.random.default_rng(seed).permutation(np.arange(1, self.num_rows * width + 1))
        self.tables = blocks.reshape(self.num_rows, width).astype(np.int32)
        self.rejected = (np.arange(self.num_rows) % np.maximum(self.query, 1)).astype(np.int32)


def both(*arrays: np.ndarray) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each array as a tensor of its own for the reference (CPU) and for the kernel (device under test)."""
    plain = [tensor(array) for array in arrays]
    return plain, there(*plain)


@pytest.mark.parametrize("case", STEPS, ids=IDS)
def test_slot_mapping(case: tuple[list[int], list[int], int, int, int, int]) -> None:
    batch = Batch(case)
    plain, device = both(batch.positions, batch.starts, batch.tables)
    expected, got = torch.empty(batch.padded, dtype=torch.int64), poisoned(batch.padded)
    call(plain_slots.compute_slot_mapping, *plain, batch.block_size, batch.max_len, expected)
    call(slot_mapping.compute_slot_mapping, *device, batch.block_size, batch.max_len, got)
    assert got.tolist() == expected.tolist()


def test_slot_mapping_without_rows_and_with_negative_blocks() -> None:
    got = poisoned(3)
    starts, tables, positions = there(
        torch.zeros(1, dtype=torch.int32), torch.zeros((0, 4), dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    )
    slot_mapping.compute_slot_mapping(positions, starts, tables, 4, 9, got)
    assert got.tolist() == [-1, -1, -1]
    got = poisoned(4)
    starts, tables, positions = there(
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([[-1, 3, 8]], dtype=torch.int32),
        torch.tensor([-1, 1, 2, 3]),
    )
    slot_mapping.compute_slot_mapping(positions, starts, tables, 2, 9, got)
    assert got.tolist() == [-1, -1, 6, 7]


def test_tokens_without_a_position_have_no_slot() -> None:
    got = poisoned(6)
    starts, tables, positions = there(
        torch.tensor([0, 5], dtype=torch.int32), torch.tensor([[7, 3]], dtype=torch.int32), torch.tensor([0, 1, 2, 3])
    )
    slot_mapping.compute_slot_mapping(positions[:3], starts, tables, 4, 9, got)
    assert got.tolist() == [28, 29, 30, -1, -1, -1]


def test_slot_mapping_of_a_strided_table() -> None:
    batch = Batch(STEPS[1])
    plain, device = both(batch.positions, batch.starts, np.repeat(batch.tables, 2, axis=0))
    expected, got = torch.empty(batch.padded, dtype=torch.int64), poisoned(batch.padded)
    call(plain_slots.compute_slot_mapping, *plain[:2], plain[2][::2], batch.block_size, batch.max_len, expected)
    call(slot_mapping.compute_slot_mapping, *device[:2], device[2][::2], batch.block_size, batch.max_len, got)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("case", STEPS, ids=IDS)
def test_prefill_inputs(case: tuple[list[int], list[int], int, int, int, int]) -> None:
    batch = Batch(case)
    rows = np.arange(batch.num_rows)
    anchors = np.where(rows % 3 == 1, -1, rows + 70)
    following = np.where(rows % 2 == 1, -1, rows + 90)
    ids = np.arange(100, 100 + batch.padded)
    plain, device = both(ids, batch.starts, batch.rejected, anchors, following)
    outputs = torch.empty(batch.padded, dtype=torch.int64), torch.empty(batch.num_rows, dtype=torch.int32)
    got = poisoned(batch.padded), poisoned(batch.num_rows, dtype=torch.int32)
    call(plain_prefill.prepare_prefill_inputs, *plain, *outputs)
    call(prefill_inputs.prepare_prefill_inputs, *device, *got)
    for ours, expected in zip(got, outputs, strict=True):
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("width", [0, 2, 5])
@pytest.mark.parametrize("case", STEPS, ids=IDS)
def test_target_inputs(case: tuple[list[int], list[int], int, int, int, int], width: int) -> None:
    batch = Batch(case)
    rows = np.arange(batch.num_rows)
    # Seats in reverse, one seat to spare; a row that does not run has none.
    seats = np.where(batch.query > 0, batch.num_rows - rows, -1).astype(np.int32)
    context_lens = np.full(batch.num_rows + 1, 5000, np.int32)
    context_lens[seats] = batch.context
    anchors = np.arange(900, 901 + batch.num_rows)
    is_prompt = batch.query > 5
    prompt = np.arange(2000, 2003 + int(batch.query[is_prompt].sum()))
    prompt_starts = (3 + np.cumsum(np.where(is_prompt, batch.query, 0)) - np.where(is_prompt, batch.query, 0)).astype(
        np.int32
    )
    drafts = np.random.default_rng(1).integers(-1, 9, (batch.num_rows, width))
    # With no prompt at all, a row that says it is one runs as another would: nothing is read past the end.
    for prompts in (prompt, prompt[:0]):
        plain, device = both(context_lens, anchors, seats, prompts, prompt_starts, drafts, batch.starts, is_prompt)
        outputs = torch.empty((2, batch.padded), dtype=torch.int64)
        got = poisoned(2, batch.padded)
        call(plain_target.prepare_target_inputs, *plain, *outputs)
        call(target_inputs.prepare_target_inputs, *device, *got)
        assert got.tolist() == outputs.tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 131])
def test_commit(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    seats = rng.permutation(num_rows + 2)[:num_rows].astype(np.int32)
    seats[rng.random(num_rows) < 0.2] = -1
    query = rng.integers(0, 5, num_rows).astype(np.int32)
    rejected = (rng.integers(0, 5, num_rows) % np.maximum(query, 1)).astype(np.int32)
    sampled = rng.integers(0, 3, num_rows).astype(np.int32)
    last = np.arange(50, 50 + num_rows)
    plain, device = both(
        *(np.arange(10, 12 + num_rows, dtype=np.int32), np.arange(900, 902 + num_rows)),
        *(seats, query, rejected, sampled, last),
    )
    call(plain_target.commit_verdict, *plain)
    call(target_inputs.commit_verdict, *device)
    for got, expected in zip(device, plain, strict=True):
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("with_active", [True, False])
@pytest.mark.parametrize("num_rows", [1, 6, 130])
def test_k_advances_equal_k_of_the_reference(num_rows: int, with_active: bool) -> None:
    rng = np.random.default_rng(num_rows)
    block_size, width, limit = 4, 3, 11
    positions = rng.integers(0, limit, num_rows)
    seq_lens = np.where(rng.random(num_rows) < 0.2, 0, positions + 1).astype(np.int32)
    tables = rng.permutation(np.arange(1, num_rows * width + 1)).reshape(num_rows, width).astype(np.int32)
    plain, device = both(positions, seq_lens, np.full(num_rows, -7), tables)
    for step in range(4):
        active = tensor(rng.random(num_rows) < 0.8) if with_active else None
        call(plain_advance.advance_draft_step, *plain, block_size, limit, active)
        on_device = None if active is None else active.to(DEVICE)
        call(advance.advance_draft_step, *device, block_size, limit, on_device)
        for got, expected in zip(device, plain, strict=True):
            assert got.tolist() == expected.tolist(), step


@pytest.mark.parametrize("seed", range(MANY))
def test_one_launch_fills_every_group(seed: int) -> None:
    """Groups of different block sizes, rows without a seat, empty rows, padded rows, into larger poisoned buffers."""
    rng = np.random.default_rng(seed)
    num_rows, num_groups, num_seats = int(rng.integers(1, 6)), 1 + seed % 3, 7
    query = rng.integers(0, 6, num_rows).astype(np.int32)
    context = rng.integers(0, 20, num_rows).astype(np.int32)
    starts = layout.make_query_start_loc(query)
    num_tokens = int(starts[-1])
    padded_rows, padded_tokens = num_rows + seed % 3, num_tokens + seed % 4
    seats = rng.permutation(num_seats)[:num_rows].astype(np.int32)
    seats[rng.random(num_rows) < 0.2] = -1
    block_sizes = [4, 2, 16][:num_groups]
    width = 13
    tables = rng.permutation(np.arange(1, num_groups * num_seats * width + 1)).reshape(num_groups, num_seats, width)
    positions = np.concatenate((layout.make_positions(context, query), np.full(2, 3)))
    plain, device = both(starts, context + query, positions, tables.astype(np.int32))
    (plain_seats,), (device_seats,) = both(seats)

    def outputs(where: torch.device) -> tuple[torch.Tensor, ...]:
        return (
            torch.full((padded_rows + 3,), POISON, dtype=torch.int32, device=where),
            torch.full((num_groups, padded_rows + 2), POISON, dtype=torch.int32, device=where),
            torch.full((num_groups, padded_rows + 2, width), POISON, dtype=torch.int32, device=where),
            torch.full((num_groups, padded_tokens + 2), POISON, dtype=torch.int64, device=where),
        )

    expected, got = outputs(torch.device("cpu")), outputs(DEVICE)
    for fill, inputs, buffers in (
        (plain_fill.fill_metadata, [plain_seats, *plain], expected),
        (metadata_fill.fill_metadata, [device_seats, *device], got),
    ):
        call(
            fill,
            *inputs,
            block_sizes,
            24,
            buffers[0][: padded_rows + 1],
            buffers[1][:, :padded_rows],
            buffers[2][:, :padded_rows],
            buffers[3][:, :padded_tokens],
        )
    for ours, plainly in zip(got, expected, strict=True):
        assert ours.tolist() == plainly.tolist()
    assert (expected[3][:, :padded_tokens] != POISON).all()
    assert (expected[1][:, num_rows:padded_rows] == 0).all()
