"""Dealing a step to ranks: the worked vectors, a walk token by token, and how level the ranks are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sharding import StepShards, count_pairs, shard_step

PROMPT, DECODE = True, False


def shard(rows: list[tuple[int, int, bool]], num_ranks: int, **options: object) -> StepShards:
    """rows: (context_len, query_len, is a prompt chunk)."""
    contexts, lens, splits = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
    return shard_step(contexts, lens, splits, num_ranks, **options)  # type: ignore[arg-type]


def gathered(shards: StepShards) -> tuple[list[int], list[bool]]:
    """Of the ranks' padded batches side by side: each place's token of the step, 0 where padded; whether it has one."""
    tokens: list[int] = []
    there: list[bool] = []
    for rank in shards.ranks:
        padding = shards.padded_tokens - rank.num_tokens
        tokens += rank.tokens.tolist() + [0] * padding
        there += [True] * rank.num_tokens + [False] * padding
    return tokens, there


@pytest.mark.parametrize(
    ("num_ranks", "rows", "tokens", "restore", "gather", "mask"),
    [
        (2, [(0, 7, PROMPT)], [3, 4], "0 1 4 5 6 7 2", "0 1 6 0 2 3 4 5", "1110 1111"),
        (4, [(0, 9, PROMPT)], [2, 2, 2, 3], "0 1 3 4 6 7 9 10 11", "0 1 0 2 3 0 4 5 0 6 7 8", "110 110 110 111"),
        (4, [(0, 1, PROMPT)], [1, 0, 0, 0], "0", "0 0 0 0", "1000"),
        (
            2,
            [(0, 3, DECODE), (0, 8, PROMPT)],
            [7, 4],
            "0 1 2 3 4 7 8 9 10 5 6",
            "0 1 2 3 4 9 10 5 6 7 8 0 0 0",
            "1111111 1111000",
        ),
    ],
)
def test_worked_vectors(
    num_ranks: int, rows: list[tuple[int, int, bool]], tokens: list[int], restore: str, gather: str, mask: str
) -> None:
    shards = shard(rows, num_ranks)
    assert [rank.num_tokens for rank in shards.ranks] == tokens
    assert shards.restore_index.tolist() == [int(word) for word in restore.split()]
    assert gathered(shards) == (
        [int(word) for word in gather.split()],
        [digit == "1" for digit in mask.replace(" ", "")],
    )


def test_equal_short_rows_go_round() -> None:
    assert [rank.num_tokens for rank in shard([(0, 4, DECODE)] * 5, 4).ranks] == [8, 4, 4, 4]


ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70), st.booleans()), max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, num_ranks=st.sampled_from([1, 2, 3, 4, 8]), sizes=st.sampled_from([(), (16, 64, 512)]))
def test_every_token_runs_once_and_sees_what_it_should(
    rows: list[tuple[int, int, bool]], num_ranks: int, sizes: tuple[int, ...]
) -> None:
    """Token by token: each is on one rank, in a local row of its own request, and sees positions 0 .. its own."""
    shards = shard(rows, num_ranks, padded_sizes=sizes)
    step_tokens = [(row, offset) for row, (_, query_len, _) in enumerate(rows) for offset in range(query_len)]
    seen: list[int] = []
    for rank in shards.ranks:
        starts = rank.query_start_loc.tolist()
        pairs = 0
        for local, (row, start) in enumerate(zip(rank.rows.tolist(), rank.starts.tolist(), strict=True)):
            context_len, query_len, may_split = rows[row]
            length = starts[local + 1] - starts[local]
            assert length > 0
            assert (local < rank.num_whole_rows) <= (length == query_len)
            assert may_split or length == query_len
            for offset in range(length):
                token = starts[local] + offset
                index = int(rank.tokens[token])
                assert step_tokens[index] == (row, start + offset)
                assert rank.positions[token] == context_len + start + offset
                # The attention interface's rule for a row's query token j.
                last_seen = int(rank.seq_lens[local]) - length + offset
                assert last_seen == rank.positions[token]
                pairs += last_seen + 1
                seen.append(index)
        assert pairs == rank.work
        assert rank.num_whole_tokens == starts[rank.num_whole_rows]
    assert sorted(seen) == list(range(len(step_tokens)))
    assert shards.num_tokens == len(step_tokens)

    largest = max(rank.num_tokens for rank in shards.ranks)
    assert shards.padded_tokens == next((size for size in sizes if size >= largest), largest)
    tokens, there = gathered(shards)
    assert len(tokens) == num_ranks * shards.padded_tokens
    assert [tokens[place] for place in shards.restore_index] == list(range(shards.num_tokens))
    assert set(np.flatnonzero(there).tolist()) == set(shards.restore_index.tolist())


@settings(max_examples=60, deadline=None)
@given(context_len=st.integers(0, 500), query_len=st.integers(1, 300), num_ranks=st.sampled_from([2, 4, 8]))
def test_a_prompt_chunk_is_cut_in_twice_as_many_pieces_as_ranks(
    context_len: int, query_len: int, num_ranks: int
) -> None:
    shards = shard([(context_len, query_len, PROMPT)], num_ranks)
    if query_len < 2 * num_ranks:
        assert [rank.num_tokens for rank in shards.ranks] == [query_len] + [0] * (num_ranks - 1)
        return
    size = -(-query_len // (2 * num_ranks))
    for index, rank in enumerate(shards.ranks):
        wanted = [
            token
            for piece in (index, 2 * num_ranks - 1 - index)
            for token in range(piece * size, min(query_len, (piece + 1) * size))
        ]
        assert rank.tokens.tolist() == wanted


def test_ranks_of_one_rank_run_the_step_as_it_is() -> None:
    shards = shard([(5, 9, PROMPT), (3, 0, DECODE), (7, 2, DECODE)], 1)
    assert shards.ranks[0].tokens.tolist() == list(range(11))
    assert shards.ranks[0].seq_lens.tolist() == [14, 9]
    assert shards.restore_index.tolist() == list(range(11))


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        shard([], 0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("query_len", [4096, 4099, 8191, 16384, 65536])
@pytest.mark.parametrize("context_len", [0, 1000, 65536])
@pytest.mark.parametrize("token_work", [0, 26_000])
def test_long_prompts_are_level(num_ranks: int, query_len: int, context_len: int, token_work: int) -> None:
    shards = shard([(context_len, query_len, PROMPT)], num_ranks, token_work=token_work)
    assert shards.work_imbalance <= 1.05
    assert shards.token_imbalance <= 1.05


@pytest.mark.parametrize("token_work", [0, 1000, 26_000])
@pytest.mark.parametrize("ragged", [False, True])
def test_sixteen_verify_rows_of_mixed_context_are_level(token_work: int, ragged: bool) -> None:
    """Contexts of 1,000 to 16,000 tokens in all mixes; rows of 5 tokens, or with one to seven drafts each."""
    source = random.Random(3)
    worst = 0.0
    for _ in range(300):
        rows = [(source.randrange(1000, 16_000), source.randrange(2, 9) if ragged else 5, DECODE) for _ in range(16)]
        shards = shard(rows, 4, token_work=token_work)
        worst = max(worst, shards.work_imbalance, 0.0 if ragged else shards.token_imbalance)
    assert worst <= 1.25, worst


def test_verify_rows_fill_up_what_prompts_leave() -> None:
    """Prompt chunks and verify rows of one step, as under chunked prefill: together level."""
    source = random.Random(5)
    for _ in range(50):
        rows = [(source.randrange(200, 8000), 5, DECODE) for _ in range(24)]
        rows += [(source.randrange(0, 4000), source.randrange(300, 2000), PROMPT) for _ in range(3)]
        source.shuffle(rows)
        for num_ranks in (2, 4):
            assert shard(rows, num_ranks).work_imbalance <= 1.05


def test_pairs_are_counted_one_by_one() -> None:
    assert count_pairs(10, 2, 3) == sum(10 + 2 + offset + 1 for offset in range(3))
