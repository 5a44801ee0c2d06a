"""How do the other ranks learn what only rank 0's device knows of a step?

When a step is launched, its tokens' ids, positions and slots and its rows' lengths are not known to any host: they
follow from drafts, rejections and stops that are still on their way. Rank 0's device makes them, and one broadcast
brings them to the others' devices, as one run of words; no host looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layout import PAD_SLOT
from target_service.device.buffers import StepShape
from target_service.pcp.order import LaunchOrder

# A row of the tables is a multiple of so many columns, for kernels that are compiled by the row's alignment.
_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class StepData:
    """A step's R rows, T tokens, as they are on the device.

    words: all of it, as it is sent. input_ids, positions: [T] int64. slots: [T + 1] int64, the last one PAD_SLOT.
    seq_lens: [R] int32, 0 for rows that do not run. block_tables: [R, B] int32.
    """

    words: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def empty(cls, order: LaunchOrder, device: torch.device) -> StepData:
        """Room for the step, on any rank: of the same size on each."""
        rows, tokens, columns = order.num_rows, order.num_tokens, order.num_columns
        lens = _even(rows)
        long_words = 3 * tokens + 1
        words = torch.empty(long_words + (lens + _even(rows * columns)) // 2, dtype=torch.int64, device=device)
        ints = words[long_words:].view(torch.int32)
        return cls(
            words,
            words[:tokens],
            words[tokens : 2 * tokens],
            words[2 * tokens : long_words],
            ints[:rows],
            ints[lens : lens + rows * columns].view(rows, columns),
        )

    def fill(self, shape: StepShape, pad: torch.Tensor) -> None:
        """Rank 0: enqueue taking over what the step's inputs and metadata are. pad: [1] int64, PAD_SLOT."""
        tokens = self.words[: 3 * shape.num_tokens + 1]
        torch.cat((shape.input_ids, shape.positions, shape.metadata.slot_mapping, pad), out=tokens)
        self.seq_lens.copy_(shape.metadata.seq_lens)
        tables = shape.metadata.block_tables
        width = min(tables.shape[1], self.block_tables.shape[1])
        self.block_tables[:, :width].copy_(tables[:, :width])
        if width < self.block_tables.shape[1]:
            self.block_tables[:, width:].zero_()

    def fill_with_nothing(self) -> None:
        """Enqueue taking over a step none of whose rows runs; for warming up."""
        self.words.zero_()
        self.slots.fill_(PAD_SLOT)


def columns_of(num_blocks: int) -> int:
    """How many columns of the tables to send where the longest row has so many blocks."""
    return -(-max(num_blocks, 1) // _COLUMNS) * _COLUMNS


def _even(count: int) -> int:
    return count + count % 2
