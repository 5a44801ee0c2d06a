"""How do the tests run mixed batches through a decoder?

A small stand-in for a service: every sequence has its own block table over one KV cache, a step takes any number of
(sequence, query length) rows, and attention runs on any backend, on the decoder's device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.decoder import Decoder, ForwardOutput
from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionMetadata, AttentionPlan
from kernels.attention.registry import make_attention
from kernels.layout import make_positions, make_query_start_loc, make_slot_mapping


class BatchRunner:
    """Sequences on seats 0 .. num_seats - 1; `step` advances some of them and remembers their lengths."""

    def __init__(
        self,
        decoder: Decoder,
        num_seats: int = 8,
        max_len: int = 256,
        block_size: int = 4,
        shuffle: bool = True,
        attention: str = "torch",
    ) -> None:
        self.decoder = decoder
        self.device = decoder.device
        self.block_size = block_size
        self.max_len = max_len
        num_blocks = 1 + num_seats * (-(-max_len // block_size))
        self.kv = decoder.make_kv_cache(num_blocks, block_size)
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_cache=False)
        if shuffle:  # block tables that are not one contiguous run
            blocks = self.pool.allocate(num_blocks - 1)
            assert blocks is not None
            self.pool.free(np.random.default_rng(0).permutation(blocks).tolist())
        self.blocks = RequestBlocks(self.pool, num_seats, max_len)
        self.lengths = [0] * num_seats
        config = decoder.config
        self.backends = [
            make_attention(
                *(attention, config.num_heads, config.num_kv_heads, config.head_dim),
                *(config.attention_scale, group.window),
            )
            for group in decoder.groups
        ]

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], hidden_layers: tuple[int, ...] = (), embeds: bool = False
    ) -> ForwardOutput:
        """rows: (seat, its next token ids). Hidden states come back in the rows' order."""
        input_ids = torch.tensor([token for _, tokens in rows for token in tokens], device=self.device)
        positions, plans = self.prepare([(seat, len(tokens)) for seat, tokens in rows])
        inputs = self.decoder.embed(input_ids) if embeds else input_ids
        with torch.inference_mode():
            output = self.decoder.forward(inputs, positions, plans, self.kv, hidden_layers)
        for seat, tokens in rows:
            self.lengths[seat] += len(tokens)
        return output

    def prepare(self, rows: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, list[AttentionPlan]]:
        """rows: (seat, query length). Reserves blocks; returns positions [T] and one plan per KV group."""
        seats = [seat for seat, _ in rows]
        query_lens = np.array([query_len for _, query_len in rows], dtype=np.int32)
        context_lens = np.array([self.lengths[seat] for seat in seats], dtype=np.int32)
        for seat, total in zip(seats, context_lens + query_lens, strict=True):
            assert self.blocks.reserve(seat, int(total))
        query_start_loc = make_query_start_loc(query_lens)
        positions = make_positions(context_lens, query_lens)
        tables = self.blocks.table_np[seats]
        seq_lens = (context_lens + query_lens).astype(np.int32)
        slots = make_slot_mapping(tables, positions, query_start_loc, self.block_size, self.max_len, len(positions))
        metadata = AttentionMetadata(
            query_start_loc=self._there(query_start_loc),
            seq_lens=self._there(seq_lens),
            block_tables=self._there(tables),
            slot_mapping=self._there(slots),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
        )
        return self._there(positions), [backend.plan(metadata) for backend in self.backends]

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def rewind(self, seat: int, length: int) -> None:
        """Forget tokens past `length`, as after rejected drafts: their KV stays in the cache."""
        self.lengths[seat] = length
