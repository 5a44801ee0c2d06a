"""The target's step kernels give what their references give, element for element."""

from __future__ import annotations

import pytest

from kernels.reference import commit_rows as plain_commit
from kernels.reference import ring_entry as plain_ring
from kernels.reference import take_drafts as plain_take
from kernels.triton.commit_rows import commit_rows
from kernels.triton.ring_entry import write_ring_entry
from kernels.triton.take_drafts import take_drafts
from tests.kernels.target_steps import EPOCH, NUM_REPLY_ROWS, SEQ, run_commit, run_ring, run_take
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize("tag", [(SEQ, EPOCH, NUM_REPLY_ROWS), (SEQ, EPOCH, 3), None])
@pytest.mark.parametrize(("width", "query_stride", "with_probs"), [(3, 0, True), (0, 1, True), (6, 7, False)])
def test_take_drafts(tag: tuple[int, int, int] | None, width: int, query_stride: int, with_probs: bool) -> None:
    options = {"tag": tag, "width": width, "query_stride": query_stride, "with_probs": with_probs}
    expected = run_take(plain_take.take_drafts, DEVICE, **options)  # type: ignore[arg-type]
    assert run_take(take_drafts, DEVICE, **options) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_commit_rows(width: int) -> None:
    assert run_commit(commit_rows, DEVICE, width) == run_commit(plain_commit.commit_rows, DEVICE, width)


@pytest.mark.parametrize("seats", [(2, -1, 0, 1, -1), (), (-1, -1), (3,), (3, 4, 5)])
@pytest.mark.parametrize(("width", "with_tables"), [(5, True), (0, False), (5000, False)])
def test_ring_entry(seats: tuple[int, ...], width: int, with_tables: bool) -> None:
    expected = run_ring(plain_ring.write_ring_entry, DEVICE, width, with_tables, seats)
    assert run_ring(write_ring_entry, DEVICE, width, with_tables, seats) == expected
