"""Where on the device does a step's state lie, from its inputs to its verdicts?

Everything is allocated once and only ever written in place, so that a captured graph finds it again. A `StepShape` is
a step's size, and the views of the buffers that go with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.interface import AttentionMetadata
from kernels.layout import blocks_needed
from kernels.reference.commit_rows import TOKENS
from target_service.device.plan_buffer import PlanBuffer
from target_service.device.tables import DeviceTables


@dataclass(frozen=True, slots=True)
class Sizes:
    """max_rows: padded rows included; max_tokens: padded ones included; max_drafts: that a row verifies; table_width:
    columns of a block table; max_seq_len: bound of a row's length, padded tokens included.
    """

    num_seats: int
    max_rows: int
    max_tokens: int
    max_drafts: int
    table_width: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step's size and its views. R rows, padded ones included; T tokens; K drafts at most per row.

    query_stride: tokens of each row where all have as many (a uniform step), else 0. seats, seq_lens, num_drafts [R]
    int32; start_positions [R] int64; has_probs [R] bool; drafts [R, K] int64: what `take_drafts` makes. input_ids,
    positions [T] int64. metadata: for attention, over buffers that `fill_metadata` fills: out_*. query_lens,
    num_sampled, num_rejected [R] int32; anchors [R] int64; table [R, TOKENS + K + 1] int64: what `commit_rows` makes.
    packed: the table as one run.
    """

    num_rows: int
    num_tokens: int
    query_stride: int
    seats: torch.Tensor
    seq_lens: torch.Tensor
    num_drafts: torch.Tensor
    start_positions: torch.Tensor
    has_probs: torch.Tensor
    drafts: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    out_query_start_loc: torch.Tensor
    out_seq_lens: torch.Tensor
    out_block_tables: torch.Tensor
    out_slots: torch.Tensor
    query_lens: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    anchors: torch.Tensor
    table: torch.Tensor
    packed: torch.Tensor


def table_width(max_model_len: int, max_drafts: int, block_size: int) -> int:
    """Columns of a block table: a row's padded tokens may lie past its length limit."""
    return blocks_needed(max_model_len + max_drafts + 1, block_size)


class StepBuffers:
    """The buffers. context_lens: [S] int32, committed KV; anchors: [S] int64, last sampled token; both by seat. table:
    that of any shape is its beginning.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def longs(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows, tokens, drafts = sizes.max_rows, sizes.max_tokens, sizes.max_drafts
        self.sizes = sizes
        self.context_lens = ints(sizes.num_seats)
        self.seat_anchors = longs(sizes.num_seats)
        self.missed = ints(1)
        self.no_prompt = longs(0)
        # A uniform step: row r's tokens begin at r * stride; none of them is a prompt.
        self._counting = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.uniform_prompts = torch.zeros(rows, dtype=torch.bool, device=device)
        self._seats, self._seq_lens, self._num_drafts = ints(rows), ints(rows), ints(rows)
        self._start_positions = longs(rows)
        self._has_probs = torch.zeros(rows, dtype=torch.bool, device=device)
        self._drafts = longs(rows * drafts)
        self._input_ids, self._positions, self._slots = longs(tokens), longs(tokens), longs(1, tokens)
        self._query_start_loc, self._out_seq_lens = ints(rows + 1), ints(1, rows)
        self._block_tables = ints(1, rows, sizes.table_width)
        self._query_lens, self._num_sampled, self._num_rejected = ints(rows), ints(rows), ints(rows)
        self._anchors = longs(rows)
        self.table = longs(rows * (TOKENS + drafts + 1))
        self._shapes: dict[tuple[int, int], StepShape] = {}
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._owners: dict[tuple[int, int], torch.Tensor] = {}

    def uniform(self, num_rows: int, query_len: int) -> StepShape:
        """The shape of num_rows rows of query_len tokens each. Made once."""
        key = (num_rows, query_len)
        if key not in self._shapes:
            self._shapes[key] = self.shape(num_rows, num_rows * query_len, query_len - 1, query_len, query_len)
        return self._shapes[key]

    def uniform_starts(self, num_rows: int, query_len: int) -> torch.Tensor:
        """Of that shape: [R + 1] int32, where each row's tokens, and its logits, begin."""
        key = (num_rows, query_len)
        if key not in self._starts:
            self._starts[key] = self._counting[: num_rows + 1] * query_len
        return self._starts[key]

    def uniform_owners(self, num_rows: int, query_len: int) -> torch.Tensor:
        """Of that shape: [T] int64, the row of each token, and of each row of logits."""
        key = (num_rows, query_len)
        if key not in self._owners:
            tokens = torch.arange(num_rows * query_len, device=self._counting.device)
            self._owners[key] = torch.div(tokens, query_len, rounding_mode="floor")
        return self._owners[key]

    def shape(self, num_rows: int, num_tokens: int, width: int, max_query_len: int, query_stride: int = 0) -> StepShape:
        """The views of any step. width: K."""
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc[: num_rows + 1],
            seq_lens=self._out_seq_lens[0, :num_rows],
            block_tables=self._block_tables[0, :num_rows],
            slot_mapping=self._slots[0, :num_tokens],
            max_query_len=max_query_len,
            max_seq_len=self.sizes.max_seq_len,
        )
        packed = self.table[: num_rows * (TOKENS + width + 1)]
        return StepShape(
            num_rows=num_rows,
            num_tokens=num_tokens,
            query_stride=query_stride,
            seats=self._seats[:num_rows],
            seq_lens=self._seq_lens[:num_rows],
            num_drafts=self._num_drafts[:num_rows],
            start_positions=self._start_positions[:num_rows],
            has_probs=self._has_probs[:num_rows],
            drafts=self._drafts[: num_rows * width].view(num_rows, width),
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            metadata=metadata,
            out_query_start_loc=metadata.query_start_loc,
            out_seq_lens=self._out_seq_lens[:, :num_rows],
            out_block_tables=self._block_tables[:, :num_rows],
            out_slots=self._slots[:, :num_tokens],
            query_lens=self._query_lens[:num_rows],
            num_sampled=self._num_sampled[:num_rows],
            num_rejected=self._num_rejected[:num_rows],
            anchors=self._anchors[:num_rows],
            table=packed.view(num_rows, TOKENS + width + 1),
            packed=packed,
        )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """All that steps work in on the device. buffers: what they make. plans: what the host tells of one. tables: the
    block tables of all seats.
    """

    buffers: StepBuffers
    plans: PlanBuffer
    tables: DeviceTables
