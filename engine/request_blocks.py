"""Which blocks does each seat hold, and how does the device see them?

Per seat: the list of its blocks in order, the hashes of those already registered, and one row of the block table that
attention reads. The host twin of the table is what is written; `sync` brings the device up to date once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.block_pool import NULL_BLOCK, BlockHash, BlockPool
from engine.errors import IntegrityError
from kernels.layout import blocks_needed


class RequestBlocks:
    """Owner of the blocks of every seat, for one KV group. Used by one thread.

    max_len: longest request in tokens, the look-ahead for drafts included.
    table: [num_seats, max_blocks] int32 on `device`; table_np is its host twin. Entries past a seat's blocks are
    NULL_BLOCK.
    """

    def __init__(self, pool: BlockPool, num_seats: int, max_len: int, device: torch.device | str = "cpu") -> None:
        self.pool = pool
        self.num_seats = num_seats
        self.max_blocks = blocks_needed(max_len, pool.block_size)
        self.table_np = np.full((num_seats, self.max_blocks), NULL_BLOCK, dtype=np.int32)
        device = torch.device(device)
        # On the CPU the device table *is* the host twin: one memory, nothing to copy.
        host_table = torch.from_numpy(self.table_np)
        self._host_table = host_table
        self.table = host_table if device.type == "cpu" else torch.zeros_like(host_table, device=device)
        self._blocks: list[list[int]] = [[] for _ in range(num_seats)]
        self._hashes: list[list[BlockHash]] = [[] for _ in range(num_seats)]
        self._dirty: set[int] = set()

    def blocks(self, seat: int) -> tuple[int, ...]:
        return tuple(self._blocks[seat])

    def num_blocks(self, seat: int) -> int:
        return len(self._blocks[seat])

    def capacity(self, seat: int) -> int:
        """How many tokens the seat's blocks have room for."""
        return len(self._blocks[seat]) * self.pool.block_size

    def adopt(self, seat: int, token_ids: Sequence[int]) -> int:
        """Give an empty seat the cached blocks of the longest known prefix of token_ids.

        Returns how many tokens they hold: a multiple of the block size, always < len(token_ids).
        """
        if self._blocks[seat]:
            raise IntegrityError(f"seat {seat} already holds blocks")
        blocks, hashes = self.pool.match(token_ids)
        self._append(seat, blocks)
        self._hashes[seat] = hashes
        return len(blocks) * self.pool.block_size

    def reserve(self, seat: int, length: int) -> bool:
        """Make room for `length` tokens in all. False, and nothing taken, where the pool or the table has no room."""
        missing = blocks_needed(length, self.pool.block_size) - len(self._blocks[seat])
        if missing <= 0:
            return True
        if len(self._blocks[seat]) + missing > self.max_blocks:
            return False
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        self._append(seat, blocks)
        return True

    def trim(self, seat: int, length: int) -> None:
        """Give back the blocks past those that `length` tokens need (a surplus prefix hit, unused look-ahead).

        Where `length` ends inside a shared block, the tokens after it are written again into that block: the same
        tokens after the same prefix, hence the same KV for whoever else reads it.
        """
        keep = blocks_needed(length, self.pool.block_size)
        blocks = self._blocks[seat]
        if keep >= len(blocks):
            return
        self.pool.free(blocks[keep:])
        self.table_np[seat, keep : len(blocks)] = NULL_BLOCK
        del blocks[keep:]
        del self._hashes[seat][keep:]
        self._dirty.add(seat)

    def register_written(self, seat: int, token_ids: Sequence[int], written_len: int | None = None) -> None:
        """Offer the seat's full blocks to later requests.

        token_ids: the request's committed tokens from position 0. written_len: how many of them have final KV in the
        cache (default: all). With pool.shift 1 a block also needs the committed token after it. Cheap when no block
        was completed.
        """
        written = len(token_ids) if written_len is None else written_len
        hashes = self._hashes[seat]
        blocks = self._blocks[seat]
        num_full = min(written // self.pool.block_size, len(blocks))
        while len(hashes) < num_full:
            index = len(hashes)
            tokens = self.pool.covered_tokens(index, token_ids)
            if tokens is None:
                return
            hashes.append(self.pool.register(blocks[index], hashes[-1] if hashes else None, tokens))

    def release(self, seat: int, token_ids_written: Sequence[int] = ()) -> None:
        """Free the seat's blocks, after registering those that token_ids_written (KV final) fills. Idempotent."""
        if token_ids_written:
            self.register_written(seat, token_ids_written)
        blocks = self._blocks[seat]
        if not blocks:
            return
        self.pool.free(blocks)
        self.table_np[seat, : len(blocks)] = NULL_BLOCK
        self._blocks[seat] = []
        self._hashes[seat] = []
        self._dirty.add(seat)

    def sync(self) -> torch.Tensor:
        """Bring the device table up to date and return it."""
        if self._dirty:
            if self.table is not self._host_table:
                seats = torch.tensor(sorted(self._dirty), dtype=torch.int64)
                self.table[seats.to(self.table.device)] = self._host_table[seats].to(self.table.device)
            self._dirty.clear()
        return self.table

    def take_changed(self) -> set[int]:
        """The seats whose blocks have changed since this was last asked; for an owner that keeps a device table of its
        own, in the place of `sync`.
        """
        changed, self._dirty = self._dirty, set()
        return changed

    def check_integrity(self) -> None:
        """IntegrityError unless pool, seats and table agree; every used block belongs to as many seats as it has
        references.
        """
        self.pool.check_integrity()
        counts: dict[int, int] = {}
        for seat, blocks in enumerate(self._blocks):
            row = self.table_np[seat]
            if list(row[: len(blocks)]) != blocks or (row[len(blocks) :] != NULL_BLOCK).any():
                raise IntegrityError(f"block table of seat {seat} disagrees with its blocks")
            if len(self._hashes[seat]) > len(blocks):
                raise IntegrityError(f"seat {seat} has more hashes than blocks")
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            if self.pool.ref_count(block) != counts.get(block, 0):
                raise IntegrityError(
                    f"block {block} has {self.pool.ref_count(block)} references, seats hold {counts.get(block, 0)}"
                )

    def _append(self, seat: int, blocks: list[int]) -> None:
        if not blocks:
            return
        held = self._blocks[seat]
        self.table_np[seat, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)
        self._dirty.add(seat)
