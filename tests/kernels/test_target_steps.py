"""The target's step kernels, by hand: which rows run, which drafts count, what is committed, what the ring holds."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.commit_rows import commit_rows
from kernels.reference.ring_entry import write_ring_entry
from kernels.reference.take_drafts import take_drafts
from tests.kernels.target_steps import EPOCH, NUM_REPLY_ROWS, SEQ, run_commit, run_ring, run_take

CPU = torch.device("cpu")


def test_rows_and_drafts() -> None:
    found = run_take(take_drafts, CPU)
    assert found["seats"] == [0, 1, 2, -1, 4, 5, -1, -1, 1, 2]
    assert found["seq_lens"] == [14, 15, 15, 0, 34, 24, 0, 0, 15, 16]
    assert found["drafts"] == [
        [5, 6, 7],
        [9, -1, -1],  # the second is outside the vocabulary: the rest goes with it
        [11, 12, -1],  # three tokens verify two drafts
        [-1, -1, -1],  # at its limit
        [5, 6, -1],  # the third would stand at position 33
        *[[-1, -1, -1]] * 5,
    ]
    assert found["num_drafts"] == [3, 1, 2, 0, 2, 0, 0, 0, 0, 0]
    assert found["start_positions"] == [11, 12, 13, 0, 31, 24, 0, 0, 12, 13]
    assert found["has_probs"] == [True, False, True, False, True, *[False] * 5]
    assert found["missed"] == [0]
    assert found["context_lens"] == [10, 11, 12, 20, 30, 17], "a prompt chunk says where its seat stands"
    assert found["ring_header"] == [0, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "tag", [(SEQ + 1, EPOCH, NUM_REPLY_ROWS), (SEQ, EPOCH + 1, NUM_REPLY_ROWS), (SEQ, EPOCH, 3), (0, EPOCH, 4), None]
)
def test_another_tag_is_no_reply(tag: tuple[int, int, int] | None) -> None:
    found, good = run_take(take_drafts, CPU, tag=tag), run_take(take_drafts, CPU)
    assert found["drafts"] == [[-1] * 3] * 10
    assert found["missed"] == [0 if tag is None else 1]
    assert not any(found["has_probs"])
    for name in ("seats", "seq_lens", "start_positions", "context_lens"):
        assert found[name] == good[name]


@pytest.mark.parametrize("width", [0, 1, 6])
def test_drafts_of_any_width(width: int) -> None:
    found, good = run_take(take_drafts, CPU, width=width), run_take(take_drafts, CPU)
    for row, drafts in enumerate(found["drafts"]):
        assert drafts == (good["drafts"][row] + [-1] * 3)[:width]


def test_batch_with_rows_of_one_length() -> None:
    found = run_take(take_drafts, CPU, query_stride=7)
    assert found["seq_lens"] == [17, 18, 19, 0, 37, 24, 0, 0, 18, 19]
    assert found["drafts"] == run_take(take_drafts, CPU)["drafts"]


def test_commit() -> None:
    found = run_commit(commit_rows, CPU)
    assert found["num_sampled"] == [2, 1, 1, 0, 0, 0]
    assert found["query_lens"] == [3, 2, 5, 6, 0, 0]
    assert found["num_rejected"] == [1, 1, 0, 0, 0, 0]
    assert found["anchors"] == [101, 103, 106, -1, -1, -1]
    assert found["context_lens"] == [11, 16, 12, 15, 20, 15]
    assert found["seat_anchors"] == [103, 106, 72, 101, 74, 75]
    assert found["table"] == [
        [1, 2, 2, 15, 1, 100, 101, -1],
        [1, 1, 1, 11, 1, 103, -1, -1],
        [1, 1, 0, 16, 1, 106, -1, -1],
        [1, 0, 0, 20, 1, -1, -1, -1],
        [0, 0, 0, 0, 1, -1, -1, -1],
        [0, 0, 0, 0, 1, -1, -1, -1],
    ]


def test_ring_entry_closes_up() -> None:
    found = run_ring(write_ring_entry, CPU)
    tokens = [0, 1, 2, 3, 8, 9, 12]
    assert found["header"] == [12345, EPOCH, 5, 7, *[12345] * 4]
    assert found["query_start_loc"][:6] == [0, 4, 4, 6, 7, 7]
    assert found["seats"][:5] == [2, -1, 0, 1, -1]
    assert found["seq_lens"][:5] == [30, 0, 38, 47, 0]
    assert found["positions"] == [1000 + token for token in tokens]
    assert found["input_ids"] == [2000 + token for token in tokens]
    assert found["slot_mapping"] == [3000 + token for token in tokens]
    assert found["hidden"] == [[100.0 * token + column for column in range(5)] for token in tokens]
    assert found["num_sampled"][:6] == [1, 2, 3, 4, 5, 12345]
    assert found["num_rejected"][:5] == [11, 12, 13, 14, 15]
    assert found["anchors"][:5] == [21, 22, 23, 24, 25]
    assert found["next_prompt_tokens"][:5] == [31, 32, 33, 34, 35]
    assert found["temperatures"][:5] == [0, 0.25, 0.5, 0.75, 1]
    assert found["seeds"][:5] == [-7, -6, -5, -4, -3]
    tables = [row[:3] for row in found["block_tables"][:5]]
    assert tables == [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(5)]


def test_ring_entry_without_tables_hidden_states_or_rows() -> None:
    found = run_ring(write_ring_entry, CPU, width=0, with_tables=False)
    assert found["block_tables"] == [[12345] * 4] * 8
    assert "hidden" not in found
    empty = run_ring(write_ring_entry, CPU, seats=())
    assert empty["header"][1:4] == [EPOCH, 0, 0]
    assert empty["query_start_loc"][0] == 0
    nobody = run_ring(write_ring_entry, CPU, seats=(-1, -1))
    assert nobody["header"][1:4] == [EPOCH, 2, 0]
    assert nobody["query_start_loc"][:3] == [0, 0, 0]
