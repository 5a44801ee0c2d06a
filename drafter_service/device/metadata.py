"""What does the drafter's attention read of a step that the host has not seen yet?

As `drafter_service/metadata.py`, with every length on the device. `build` fills all KV groups' rows in one launch
(`fill_metadata`), or, with `metadata_fusion: off`, each group's by its own builder, which is the yardstick; `reuse`
reads what `take_entry` mirrored, and nothing is built. Everything lies in buffers that are made once, zeroed, and only
ever written in place: captured graphs read them where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.interface import AttentionMetadata
from kernels.kernel_set import KernelSet
from kernels.layout import PAD_SLOT
from kernels.reference.take_entry import TakenLayout, TakenRows


@dataclass(slots=True)
class MetadataCounts:
    """builds: metadata builds so far. launches: of kernels for them (those of the yardstick are not counted)."""

    builds: int = 0
    launches: int = 0


@dataclass(frozen=True, slots=True)
class MetadataSizes:
    """The most of a step: rows, tokens of its prefill, drafts of a row."""

    max_rows: int
    max_tokens: int
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Where the KV of G groups lies. seat_tables: [G, S, B] int32, their block tables by seat (groups with the same
    blocks may share memory). block_sizes: G numbers. max_len: positions.
    """

    seat_tables: torch.Tensor
    block_sizes: tuple[int, ...]
    max_len: int


@dataclass(frozen=True, slots=True)
class Building:
    """How metadata is built. counts: where that is counted. fused: one launch, else each group's own builder.
    mismatches: [1] int64, to which the number of elements that differ between the two is added at every build; None:
    they are not compared.
    """

    counts: MetadataCounts
    fused: bool
    mismatches: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Filled:
    """Destination buffers of G groups. starts: [M + 1] int32; seq_lens: [G, M] int32; tables: [G, M, B] int32; slots:
    [G, N] int64.
    """

    starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def zeros(cls, groups: int, max_rows: int, max_tokens: int, width: int, device: torch.device) -> _Filled:
        int32 = torch.int32
        return cls(
            torch.zeros(max_rows + 1, dtype=int32, device=device),
            torch.zeros((groups, max_rows), dtype=int32, device=device),
            torch.zeros((groups, max_rows, width), dtype=int32, device=device),
            torch.zeros((groups, max_tokens), dtype=torch.int64, device=device),
        )

    def sized(self, rows: int, tokens: int) -> _Filled:
        return _Filled(self.starts[: rows + 1], self.seq_lens[:, :rows], self.tables[:, :rows], self.slots[:, :tokens])

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.starts, self.seq_lens, self.tables, self.slots


class DeviceMetadata:
    """Of all KV groups of a drafter. Used by one thread."""

    def __init__(
        self,
        sizes: MetadataSizes,
        blocks: GroupBlocks,
        kernels: KernelSet,
        building: Building,
        layout: TakenLayout | None,
    ) -> None:
        """layout: the mirrored one of `reuse`, where nothing is built; None: it is."""
        groups, _, width = blocks.seat_tables.shape
        device, max_rows = blocks.seat_tables.device, sizes.max_rows
        extent = (groups, max_rows, sizes.max_tokens, width, device)
        self.max_len = blocks.max_len
        self._counts = building.counts
        self._seat_tables = blocks.seat_tables
        self._block_sizes = blocks.block_sizes
        self._kernels = kernels
        self._fused = building.fused
        self._mismatches = building.mismatches
        self._layout = layout
        self._filled = _Filled.zeros(*extent)
        self._yardstick = None if building.mismatches is None else _Filled.zeros(*extent)
        # Of the draft steps: one token a row.
        self._step_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._step_slots = torch.full((groups, max_rows), PAD_SLOT, dtype=torch.int64, device=device)
        # [K, M]: whether a row drafts more than k tokens.
        self._active = torch.zeros((sizes.max_draft_len, max_rows), dtype=torch.bool, device=device)
        self._steps = torch.arange(sizes.max_draft_len, dtype=torch.int32, device=device)[:, None]

    def build(self, taken: TakenRows) -> None:
        """The prefill's metadata, from the global batch's positions as taken over, padded rows and tokens included.

        Nothing to do in `reuse`.
        """
        if self._layout is not None:
            return
        filled = self._filled.sized(taken.seats.shape[0], taken.positions.shape[0])
        self._counts.builds += 1
        if self._fused:
            self._fill(taken, filled)
            self._counts.launches += 1
        else:
            self._counts.launches += self._fill_apart(taken, filled)
        if self._yardstick is not None and self._mismatches is not None:
            other = self._yardstick.sized(taken.seats.shape[0], taken.positions.shape[0])
            if self._fused:
                self._fill_apart(taken, other)
            else:
                self._fill(taken, other)
            for ours, theirs in zip(filled.parts(), other.parts(), strict=True):
                self._mismatches.add_((ours != theirs).sum())

    def slots(self, num_tokens: int, group: int = 0) -> torch.Tensor:
        """[num_tokens] int64: where the prefill's tokens go in the cache."""
        return self._filled.slots[group, :num_tokens] if self._layout is None else self._layout.slots[:num_tokens]

    def prefill(self, num_rows: int, num_tokens: int, max_query_len: int, group: int = 0) -> AttentionMetadata:
        """The prefill's rows, for an attention that runs over all of their tokens; views of the buffers."""
        filled = self._filled.sized(num_rows, num_tokens)
        return AttentionMetadata(
            query_start_loc=filled.starts,
            seq_lens=filled.seq_lens[group],
            block_tables=filled.tables[group],
            slot_mapping=filled.slots[group],
            max_query_len=max_query_len,
            max_seq_len=self.max_len,
        )

    def draft_step(self, taken: TakenRows, group: int = 0) -> AttentionMetadata:
        """One token a row, where the draft steps stand; views of the buffers, which `advance` moves on."""
        num_rows = taken.seats.shape[0]
        return AttentionMetadata(
            query_start_loc=self._step_starts[: num_rows + 1],
            seq_lens=taken.step_seq_lens,
            block_tables=self._tables(num_rows, group),
            slot_mapping=self._step_slots[group, :num_rows],
            max_query_len=1,
            max_seq_len=self.max_len,
        )

    def begin_draft(self, taken: TakenRows) -> None:
        """Note which rows go on at each draft step."""
        torch.gt(taken.num_drafts, self._steps, out=self._active[:, : taken.seats.shape[0]])

    def advance(self, taken: TakenRows, step: int, group: int = 0) -> None:
        """Move every row that drafts more than `step` tokens one token on, in place; the others end."""
        num_rows = taken.seats.shape[0]
        self._kernels.advance_draft_step(
            taken.step_positions,
            taken.step_seq_lens,
            self._step_slots[group, :num_rows],
            self._tables(num_rows, group),
            self._block_sizes[group],
            self.max_len,
            self._active[step, :num_rows],
        )

    def _tables(self, num_rows: int, group: int) -> torch.Tensor:
        if self._layout is not None:
            return self._layout.block_tables[:num_rows]
        return self._filled.tables[group, :num_rows]

    def _fill(self, taken: TakenRows, out: _Filled) -> None:
        self._kernels.fill_metadata(
            taken.seats,
            taken.query_start_loc,
            taken.seq_lens,
            taken.positions,
            self._seat_tables,
            self._block_sizes,
            self.max_len,
            out.starts,
            out.seq_lens,
            out.tables,
            out.slots,
        )

    def _fill_apart(self, taken: TakenRows, out: _Filled) -> int:
        """Each group by its own builder. Returns the launches."""
        out.starts.copy_(taken.query_start_loc)
        runs = (taken.seats >= 0)[:, None]
        index = taken.seats.clamp(min=0)
        for group, block_size in enumerate(self._block_sizes):
            tables = self._seat_tables[group].index_select(0, index)
            out.seq_lens[group].copy_(taken.seq_lens)
            out.tables[group].copy_(torch.where(runs, tables, 0))
            # A row that does not run must not write: a negative entry has no slot.
            writable = torch.where(runs, tables, -1)
            self._kernels.compute_slot_mapping(
                taken.positions, taken.query_start_loc, writable, block_size, self.max_len, out.slots[group]
            )
        return 3 + 5 * len(self._block_sizes)
