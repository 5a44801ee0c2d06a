"""How do the device's block tables follow the host's, when steps are enqueued ahead of it?

By changes: each plan brings what has changed in its rows' tables since the last one, in a buffer of its own that nobody
writes again until the step is done. The device applies them in the order of the steps, so a step never sees the table
of a later one, and a seat's next owner never that of the last.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.request_blocks import RequestBlocks


class SeatTables:
    """The device's tables, and what has been sent of the host's. Used by one thread.

    device: [num_seats, max_blocks] int32, zeroed. In `reuse` (blocks None) one column that nobody reads.
    """

    def __init__(self, blocks: RequestBlocks | None, num_seats: int, device: torch.device) -> None:
        self._blocks = blocks
        width = 1 if blocks is None else blocks.max_blocks
        self.device = torch.zeros((num_seats, width), dtype=torch.int32, device=device)
        self._sent = np.zeros((num_seats, width), dtype=np.int32)
        self._num_sent = [0] * num_seats

    def changes(self, seat: int, fresh: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """What the device does not know of a seat's table: flat indices and block ids. It counts as sent.

        fresh: the seat has a new owner; otherwise blocks have only been added since.
        """
        if self._blocks is None:
            return None
        table = self._blocks.table_np[seat]
        held = self._blocks.capacity(seat) // self._blocks.pool.block_size
        if fresh:
            columns = np.nonzero(table != self._sent[seat])[0]
        elif held == self._num_sent[seat]:
            return None
        else:
            columns = np.arange(self._num_sent[seat], held)
        self._num_sent[seat] = held
        blocks = table[columns]
        self._sent[seat, columns] = blocks
        return columns + seat * table.shape[0], blocks

    def forget(self, seat: int) -> None:
        """What was sent of a seat's table may not have come: when the seat is next fresh, all of it is sent."""
        self._sent[seat] = -1  # no block's id
        self._num_sent[seat] = 0
