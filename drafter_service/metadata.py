"""What does the drafter's attention read of a step, and where does that come from?

The drafter owes the target nothing about layout: `build` derives everything from the global batch's positions and the
drafter's own block tables; `reuse` takes the target's slots and tables as they are. All buffers are made once, zeroed,
and only ever written in place: a captured graph reads them where they are.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.attention.interface import AttentionMetadata
from kernels.reference.advance import advance_draft_step
from kernels.reference.slot_mapping import compute_slot_mapping


class MetadataBuilder:
    """The metadata of one KV group: of a step's draft prefill, and of the draft steps that follow it.

    builds: metadata builds so far (`build` only). launches: kernels launched for them.
    Bounds: max_rows rows and max_tokens tokens a step, max_blocks blocks a row; max_len: positions of the drafter.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, max_blocks: int, block_size: int, max_len: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.max_len = max_len
        self.builds = 0
        self.launches = 0
        # Of the prefill.
        self.query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # Of the draft steps: one token a row.
        self.step_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.step_seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.step_slots = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.step_query_start_loc = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # The tables that the draft steps read: ours, or in `reuse` the entry's.
        self._tables = self.block_tables
        # Host twins share the buffers' memory on a CPU, and do not exist elsewhere.
        self._step_seq_lens_np = self.step_seq_lens.numpy() if device.type == "cpu" else None

    def build(
        self,
        seat_tables: torch.Tensor,
        seats: np.ndarray,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        positions: torch.Tensor,
        padded_rows: int | None = None,
        padded_tokens: int | None = None,
    ) -> AttentionMetadata:
        """The prefill's metadata, `build`.

        seat_tables: [S, B] int32, the drafter's tables by seat; seats: [R]; query_start_loc: [R + 1]; seq_lens: [R],
        rejected tokens included; positions: [T] int64, the *global batch's* (relative to the row's start, where it has
        one). A position buffer of the drafter's own would be stale at rejected rows and send their KV to live slots.
        Padded rows get seq_len 0 and a flat query_start_loc, padded tokens PAD_SLOT.
        """
        num_rows, num_tokens = len(seats), int(query_start_loc[-1])
        rows = num_rows if padded_rows is None else padded_rows
        tokens = num_tokens if padded_tokens is None else padded_tokens
        starts_np = np.full(rows + 1, num_tokens, dtype=np.int32)
        starts_np[: num_rows + 1] = query_start_loc
        lens_np = np.zeros(rows, dtype=np.int32)
        lens_np[:num_rows] = seq_lens
        starts, lens = self.query_start_loc[: rows + 1], self.seq_lens[:rows]
        tables, slots = self.block_tables[:rows], self.slot_mapping[:tokens]
        starts.copy_(torch.from_numpy(starts_np))
        lens.copy_(torch.from_numpy(lens_np))
        index = torch.from_numpy(np.asarray(seats, dtype=np.int64)).to(seat_tables.device)
        torch.index_select(seat_tables, 0, index, out=tables[:num_rows])
        compute_slot_mapping(
            positions[:num_tokens],
            starts[: num_rows + 1],
            tables[:num_rows],
            self.block_size,
            self.max_len,
            out=slots,
        )
        self.builds += 1
        self.launches += 2
        self._tables = self.block_tables
        return _metadata(starts, lens, tables, slots, starts_np, lens_np)

    def reuse(
        self,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
    ) -> AttentionMetadata:
        """The prefill's metadata, `reuse`: the target's own slots [T] and tables [R, B], mirrored; nothing is built."""
        self._tables = block_tables
        starts_np = np.asarray(query_start_loc, dtype=np.int32)
        lens_np = np.asarray(seq_lens, dtype=np.int32)
        device = block_tables.device
        starts, lens = torch.from_numpy(starts_np).to(device), torch.from_numpy(lens_np).to(device)
        return _metadata(starts, lens, block_tables, slot_mapping, starts_np, lens_np)

    def begin_draft(self, last_positions: torch.Tensor, last_slots: torch.Tensor) -> None:
        """Stand at each drafting row's last valid token, from where the first draft is made.

        last_positions, last_slots: [N] int64, of the first N rows of the prefill.
        """
        num_rows = last_positions.shape[0]
        self.step_positions[:num_rows] = last_positions
        self.step_seq_lens[:num_rows] = last_positions.to(torch.int32) + 1
        self.step_slots[:num_rows] = last_slots

    def advance(self, num_rows: int, active: torch.Tensor | None = None) -> None:
        """Move the first num_rows rows one token on, in place. Rows at the length limit, or not active, end: PAD."""
        advance_draft_step(
            self.step_positions[:num_rows],
            self.step_seq_lens[:num_rows],
            self.step_slots[:num_rows],
            self._tables[:num_rows],
            self.block_size,
            self.max_len,
            active,
        )

    def draft_step(self, num_rows: int) -> AttentionMetadata:
        """The present draft step's metadata: views of the persistent buffers, one query token a row."""
        starts = self.step_query_start_loc[: num_rows + 1]
        if self._step_seq_lens_np is not None:
            lens_np = self._step_seq_lens_np[:num_rows]
        else:  # some backends need them on the host; whoever must not wait uses device/metadata.py
            lens_np = self.step_seq_lens[:num_rows].cpu().numpy()
        return AttentionMetadata(
            query_start_loc=starts,
            seq_lens=self.step_seq_lens[:num_rows],
            block_tables=self._tables[:num_rows],
            slot_mapping=self.step_slots[:num_rows],
            max_query_len=1,
            max_seq_len=int(lens_np.max(initial=0)),
            query_start_loc_np=np.arange(num_rows + 1, dtype=np.int32),
            seq_lens_np=lens_np,
        )


def _metadata(
    starts: torch.Tensor,
    lens: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    starts_np: np.ndarray,
    lens_np: np.ndarray,
) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slots,
        max_query_len=int(np.diff(starts_np).max(initial=0)),
        max_seq_len=int(lens_np.max(initial=0)),
        query_start_loc_np=starts_np,
        seq_lens_np=lens_np,
    )
