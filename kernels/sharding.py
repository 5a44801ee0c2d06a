"""Which rank runs which tokens of a step, and how do their results come back in order?

Host arithmetic of prefill-context parallelism, numpy only (no torch). A row that may be split (a prompt chunk) is cut
in 2P pieces of ceil(query_len / 2P) tokens, and rank r takes pieces r and 2P - 1 - r: early pieces see few keys, late
ones many, so that every pair costs about the same (the head-tail layout of context-parallel training). Every other row
goes whole to one rank, the costliest first, always to the rank with the least work so far. A piece is an ordinary row
of its rank: its queries are its own tokens, its keys are all positions of the request up to its last one.

R rows, T tokens, P ranks. `gathered` is the ranks' local batches side by side, each padded to the same length.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.layout import Int32Array, Int64Array, IntArray, make_query_start_loc

# What a token costs beside attention, in query-key pairs: the linear layers' operations over those of one pair. Right
# for dense models of some 8B parameters; whoever knows the model passes its own figure.
DEFAULT_TOKEN_WORK = 26_000


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank runs: L local rows, n tokens; rows that are whole come first, then pieces, each in the step's
    order.

    rows: [L] the row of the step that each local row is of; starts: [L] its first query token within that row.
    query_start_loc: [L + 1] int32, over the rank's own tokens. seq_lens: [L] int32, last position of the row + 1.
    tokens: [n] int64, each local token's index in the step. positions: [n] int64, absolute.
    num_whole_rows, num_whole_tokens: how many of them need no other rank's keys of this step.
    work: query-key pairs of its attention.
    """

    rows: Int64Array
    starts: Int64Array
    query_start_loc: Int32Array
    seq_lens: Int32Array
    tokens: Int64Array
    positions: Int64Array
    num_whole_rows: int
    num_whole_tokens: int
    work: int

    @property
    def num_tokens(self) -> int:
        """n."""
        return int(self.tokens.shape[0])

    @property
    def query_lens(self) -> Int32Array:
        """[L] int32."""
        return np.diff(self.query_start_loc)


@dataclass(frozen=True, slots=True)
class StepShards:
    """A step over P ranks.

    padded_tokens: length of every rank's local batch in `gathered`. restore_index: [T] int64,
    `step = gathered[restore_index]`. token_work: what a token weighs beside its pairs.
    """

    ranks: tuple[RankShard, ...]
    num_tokens: int
    padded_tokens: int
    restore_index: Int64Array
    token_work: int

    @property
    def token_imbalance(self) -> float:
        """Tokens of the fullest rank over the mean; 1.0 for an empty step."""
        return _largest_over_mean([shard.num_tokens for shard in self.ranks])

    @property
    def work_imbalance(self) -> float:
        """The same of all work: pairs, and token_work for every token."""
        return _largest_over_mean([shard.work + self.token_work * shard.num_tokens for shard in self.ranks])


def count_pairs(context_len: int, start: int, length: int) -> int:
    """Query-key pairs of query tokens start .. start + length - 1 of a row that has context_len tokens behind it."""
    return length * (context_len + start) + length * (length + 1) // 2


def shard_step(
    context_lens: IntArray,
    query_lens: IntArray,
    splits: IntArray,
    num_ranks: int,
    token_work: int = DEFAULT_TOKEN_WORK,
    padded_sizes: Sequence[int] = (),
) -> StepShards:
    """Deal a step to `num_ranks` ranks. The same arguments give the same answer on every rank.

    context_lens, query_lens: [R]; splits: [R] bool, rows that may be cut (prompt chunks); shorter ones than 2P tokens
    are not worth it and go whole. padded_sizes: ascending; local batches are padded to the smallest of them that holds
    the largest, to the largest itself where none does. Raises ValueError on num_ranks < 1.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks: must be at least 1, got {num_ranks}")
    contexts: list[int] = np.asarray(context_lens).tolist()
    lens: list[int] = np.asarray(query_lens).tolist()
    may_split: list[bool] = np.asarray(splits).astype(bool).tolist()
    whole: list[list[int]] = [[] for _ in range(num_ranks)]
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]  # row, start, length
    pairs = [0] * num_ranks
    counts = [0] * num_ranks
    undealt: list[tuple[int, int, int]] = []  # minus the pairs, row, length
    for row, (context_len, query_len) in enumerate(zip(contexts, lens, strict=True)):
        if query_len <= 0:
            continue
        if num_ranks == 1 or not may_split[row] or query_len < 2 * num_ranks:
            undealt.append((-count_pairs(context_len, 0, query_len), row, query_len))
            continue
        for rank, start, length in _pieces(query_len, num_ranks):
            pieces[rank].append((row, start, length))
            pairs[rank] += count_pairs(context_len, start, length)
            counts[rank] += length
    loads = [(pairs[rank] + token_work * counts[rank], counts[rank], rank) for rank in range(num_ranks)]
    heapq.heapify(loads)
    for negative_pairs, row, query_len in sorted(
        undealt, key=lambda item: (item[0] - token_work * item[2], item[1])
    ):  # costliest first, the step's order among equals
        load, count, rank = heapq.heappop(loads)
        whole[rank].append(row)
        pairs[rank] -= negative_pairs
        heapq.heappush(loads, (load - negative_pairs + token_work * query_len, count + query_len, rank))
    starts = make_query_start_loc(np.asarray(lens, dtype=np.int64))
    shards = tuple(
        _rank_shard(sorted(whole[rank]), pieces[rank], contexts, lens, starts, pairs[rank]) for rank in range(num_ranks)
    )
    return _with_restore_index(shards, int(starts[-1]), padded_sizes, token_work)


def _pieces(query_len: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """(rank, start, length) of the pieces that are not empty; a rank's two are one where they touch."""
    size = -(-query_len // (2 * num_ranks))
    found: list[tuple[int, int, int]] = []
    for rank in range(num_ranks):
        head, tail = rank * size, (2 * num_ranks - 1 - rank) * size
        head_len = min(size, max(0, query_len - head))
        tail_len = min(size, max(0, query_len - tail))
        if tail_len and head + head_len == tail:
            found.append((rank, head, head_len + tail_len))
            continue
        found += [(rank, start, length) for start, length in ((head, head_len), (tail, tail_len)) if length]
    return found


def _rank_shard(
    whole: list[int],
    pieces: list[tuple[int, int, int]],
    contexts: list[int],
    lens: list[int],
    step_starts: Int32Array,
    work: int,
) -> RankShard:
    local = [(row, 0, lens[row]) for row in whole] + pieces
    table = np.asarray(local, dtype=np.int64).reshape(-1, 3)
    rows, starts, local_lens = table[:, 0], table[:, 1], table[:, 2]
    row_contexts = np.asarray(contexts, dtype=np.int64)[rows]
    query_start_loc = make_query_start_loc(local_lens)
    within = np.arange(int(query_start_loc[-1]), dtype=np.int64) - np.repeat(
        query_start_loc[:-1].astype(np.int64), local_lens
    )
    return RankShard(
        rows=rows,
        starts=starts,
        query_start_loc=query_start_loc,
        seq_lens=(row_contexts + starts + local_lens).astype(np.int32),
        tokens=within + np.repeat(step_starts[:-1].astype(np.int64)[rows] + starts, local_lens),
        positions=within + np.repeat(row_contexts + starts, local_lens),
        num_whole_rows=len(whole),
        num_whole_tokens=int(query_start_loc[len(whole)]),
        work=work,
    )


def _with_restore_index(
    shards: tuple[RankShard, ...], num_tokens: int, padded_sizes: Sequence[int], token_work: int
) -> StepShards:
    largest = max(shard.num_tokens for shard in shards)
    padded_tokens = next((size for size in padded_sizes if size >= largest), largest)
    restore_index = np.zeros(num_tokens, dtype=np.int64)
    for rank, shard in enumerate(shards):
        restore_index[shard.tokens] = rank * padded_tokens + np.arange(shard.num_tokens, dtype=np.int64)
    return StepShards(shards, num_tokens, padded_tokens, restore_index, token_work)


def _largest_over_mean(values: list[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
