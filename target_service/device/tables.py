"""How does the device learn of the blocks that requests were given and have lost?

One table of block ids by seat stays on the device; each step brings what has changed for the rows that it runs. The
changes are taken from the host's table when a step is launched and travel with its plan, so the host may go on changing
its own while steps are under way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.request_blocks import RequestBlocks
from target_service.device.plan_buffer import HostPlan, PlanBuffer


class DeviceTables:
    """The block tables of all seats as the device has them. Used by one thread.

    table: [num_seats, width] int32, width at least the host's; what lies behind a seat's blocks is the null block.
    """

    def __init__(self, blocks: RequestBlocks, width: int, device: torch.device) -> None:
        self._blocks = blocks
        self.table = torch.zeros((blocks.num_seats, max(width, blocks.max_blocks)), dtype=torch.int32, device=device)
        self._flat = self.table.view(-1)
        self._sent = np.zeros_like(blocks.table_np)
        self._sent_lens = [0] * blocks.num_seats
        self._stale: set[int] = set()

    def changes(self, seats: Iterable[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """What the device does not know of these seats: where in the table, [n] int64, and the block ids, [n] int32.
        None: nothing. The caller sends it, before anything that is launched later.
        """
        blocks, width = self._blocks, self.table.shape[1]
        self._stale |= blocks.take_changed()
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for seat in self._stale.intersection(seats):
            self._stale.discard(seat)
            num_blocks = blocks.num_blocks(seat)
            end = max(num_blocks, self._sent_lens[seat])
            row, sent = blocks.table_np[seat, :end], self._sent[seat, :end]
            columns = np.flatnonzero(row != sent)
            if columns.shape[0]:
                places.append(columns + seat * width)
                values.append(row[columns])
                sent[:] = row
            self._sent_lens[seat] = num_blocks
        return (np.concatenate(places), np.concatenate(values)) if places else None

    def forget(self, seats: Iterable[int]) -> None:
        """What was to be sent of these seats may not have come: send all of it next time."""
        for seat in seats:
            self._sent[seat] = -1
            self._sent_lens[seat] = self._sent.shape[1]
            self._stale.add(seat)

    def add(self, buffer: PlanBuffer, plan: HostPlan, seats: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The changes as tensors that arrive with the plan; for `apply`, once it is uploaded."""
        changes = self.changes(seats)
        if changes is None:
            return None
        return buffer.added(plan, changes[0]), buffer.added(plan, changes[1])

    def apply(self, changes: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Enqueue the change of the device's table."""
        if changes is not None:
            self._flat.index_copy_(0, *changes)
