"""What does rank 0 tell the other ranks of a step?

Everything that decides what a rank runs: the rows that run, their lengths, blocks and input ids, which rows need
logits, which layers the drafter wants. All ranks, rank 0 included, work from the same order, so no rank ever decides
by something that another does not know. Encoded as int64 and int32 arrays behind a header, to be read in place.

With device execution rank 0's host knows only part of that, which is a `LaunchOrder`; the rest follows from device to
device (`broadcast.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kernels.layout import BoolArray, Int32Array, Int64Array, blocks_needed

_HEADER_WORDS = 6  # rows, tokens, columns of the block tables, hidden layers, and two spare
_LAUNCH_WORDS = 5  # rows, columns, hidden layers, way, greedy


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step's R rows that run, T tokens.

    context_lens, query_lens, num_logits: [R] int64; num_logits: how many of a row's last tokens need logits.
    splits: [R] bool, prompt chunks. input_ids: [T] int64. block_tables: [R, B] int32, B: as many as the longest row
    needs. hidden_layers: whose output the drafter wants, for every token.
    """

    context_lens: Int64Array
    query_lens: Int64Array
    num_logits: Int64Array
    splits: BoolArray
    input_ids: Int64Array
    block_tables: Int32Array
    hidden_layers: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.query_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[0])

    def encode_into(self, buffer: memoryview) -> int:
        """Write it to the start of `buffer` and return how many bytes it took. ValueError where it does not fit."""
        num_rows, columns = self.block_tables.shape
        header = np.array([num_rows, self.num_tokens, columns, len(self.hidden_layers), 0, 0], dtype=np.int64)
        layers = np.array(self.hidden_layers, dtype=np.int64)
        parts: Sequence[np.ndarray] = (
            header,
            self.context_lens,
            self.query_lens,
            self.num_logits,
            self.splits.astype(np.int64),
            layers,
            self.input_ids,
            self.block_tables.reshape(-1),
        )
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes > len(buffer):
            raise ValueError(f"a step of {num_bytes} bytes does not fit {len(buffer)}")
        flat = np.frombuffer(buffer, dtype=np.uint8)
        offset = 0
        for part in parts:
            flat[offset : offset + part.nbytes] = np.ascontiguousarray(part).view(np.uint8)
            offset += part.nbytes
        return num_bytes

    @classmethod
    def decode(cls, buffer: memoryview) -> StepOrder:
        """What `encode_into` wrote; copies, so that the buffer may be written again."""
        num_rows, num_tokens, columns, num_layers = np.frombuffer(buffer, np.int64, _HEADER_WORDS).tolist()[:4]
        words = np.frombuffer(buffer, np.int64, 4 * num_rows + num_layers + num_tokens, _HEADER_WORDS * 8).copy()
        cuts = np.cumsum([num_rows, num_rows, num_rows, num_rows, num_layers])
        contexts, lens, num_logits, splits, layers, input_ids = np.split(words, cuts)
        tables = np.frombuffer(buffer, np.int32, num_rows * columns, _HEADER_WORDS * 8 + words.nbytes)
        return cls(
            contexts,
            lens,
            num_logits,
            splits.astype(np.bool_),
            input_ids,
            tables.reshape(num_rows, columns).copy(),
            tuple(layers.tolist()),
        )


class Way(IntEnum):
    """How a launched step is run. EAGER: as it is. UNIFORM: by GraphCache.run under its key. CAPTURE: by
    GraphCache.capture. On all ranks alike, which have the same keys.
    """

    EAGER = 0
    UNIFORM = 1
    CAPTURE = 2


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """What rank 0's host knows of a step's R rows, T tokens, when it launches it.

    context_lens: [R] int64, at most so (exact for prompt chunks): only how the step is dealt depends on it, and bounds.
    query_lens: [R] int64, 0 where a row does not run; one that turns out not to run on the device counts all the same.
    num_logits, splits, hidden_layers: see StepOrder. num_columns: of the block tables that follow, as many as the
    longest row can need. way: all but EAGER only for uniform steps, whose order follows from their key. greedy: how a
    uniform step ends on rank 0, which is no other rank's affair but that its graph is another one.
    """

    context_lens: Int64Array
    query_lens: Int64Array
    num_logits: Int64Array
    splits: BoolArray
    num_columns: int
    hidden_layers: tuple[int, ...]
    way: Way = Way.EAGER
    greedy: bool = False

    @classmethod
    def uniform(
        cls,
        num_rows: int,
        query_len: int,
        num_columns: int,
        hidden_layers: tuple[int, ...],
        block_size: int,
        way: Way,
        greedy: bool,
    ) -> LaunchOrder:
        """Decode rows of query_len tokens each, all with logits. Contexts are bounded by what the columns hold, so that
        nothing of it depends on where the rows are.
        """
        lens = np.full(num_rows, query_len, dtype=np.int64)
        contexts = np.full(num_rows, num_columns * block_size - query_len, dtype=np.int64)
        return cls(contexts, lens, lens, np.zeros(num_rows, dtype=np.bool_), num_columns, hidden_layers, way, greedy)

    @property
    def key(self) -> tuple[int, int, int, tuple[int, ...], bool]:
        """Of a uniform step, on every rank: two with the same key are the same."""
        return self.num_rows, int(self.query_lens[0]), self.num_columns, self.hidden_layers, self.greedy

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.query_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_lens.sum())

    def encode_into(self, buffer: memoryview) -> int:
        """Write it to the start of `buffer` and return how many bytes it took. ValueError where it does not fit."""
        words = np.concatenate(
            (
                np.array(
                    [self.num_rows, self.num_columns, len(self.hidden_layers), self.way, self.greedy], dtype=np.int64
                ),
                self.context_lens,
                self.query_lens,
                self.num_logits,
                self.splits.astype(np.int64),
                np.array(self.hidden_layers, dtype=np.int64),
            )
        )
        if words.nbytes > len(buffer):
            raise ValueError(f"a step of {words.nbytes} bytes does not fit {len(buffer)}")
        np.frombuffer(buffer, np.int64, words.shape[0])[:] = words
        return words.nbytes

    @classmethod
    def decode(cls, buffer: memoryview) -> LaunchOrder:
        """What `encode_into` wrote; copies, so that the buffer may be written again."""
        num_rows, num_columns, num_layers, way, greedy = np.frombuffer(buffer, np.int64, _LAUNCH_WORDS).tolist()
        words = np.frombuffer(buffer, np.int64, 4 * num_rows + num_layers, _LAUNCH_WORDS * 8).copy()
        contexts, lens, num_logits, splits, layers = np.split(words, np.arange(1, 5) * num_rows)
        hidden_layers = tuple(layers.tolist())
        prompts = splits.astype(np.bool_)
        return cls(contexts, lens, num_logits, prompts, num_columns, hidden_layers, Way(way), bool(greedy))


def logit_tokens(query_lens: Int64Array, num_logits: Int64Array) -> Int64Array:
    """The step's tokens that need logits, ascending: of each row the last num_logits."""
    ends = np.cumsum(query_lens)
    total = int(num_logits.sum())
    # Of each row the first wanted token less the number of wanted ones before it: counting on from there is right.
    return np.repeat(ends - np.cumsum(num_logits), num_logits) + np.arange(total, dtype=np.int64)


def most_bytes(max_rows: int, max_tokens: int, max_blocks: int, num_layers: int) -> int:
    """The largest order that a target with these limits can give."""
    return 8 * (_HEADER_WORDS + 4 * max_rows + num_layers + max_tokens) + 4 * max_rows * max_blocks


def most_launch_bytes(max_rows: int, num_layers: int) -> int:
    """The largest LaunchOrder that a target with these limits can give."""
    return 8 * (_LAUNCH_WORDS + 4 * max_rows + num_layers)


def table_columns(context_lens: Int64Array, query_lens: Int64Array, block_size: int) -> int:
    """How many columns of the block tables the longest row needs."""
    longest = int((context_lens + query_lens).max(initial=0))
    return blocks_needed(longest, block_size)
