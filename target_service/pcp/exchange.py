"""How does every rank get the keys and values of the tokens that the others run?

One all-gather a layer, keys and values together. `PcpPlan` is an attention plan like any other, so the decoder knows
nothing of ranks: it sends this rank's KV on its way, attends the rows that are whole here (they need nobody else's
keys of this step), then waits for the others' KV, writes it to its slots, and attends the pieces. Where a rank has no
pieces, the wait is put off until the next layer, and the exchange runs beside the rest of this one. Each token is
written exactly once on every rank: those of whole rows by the backend, all others from what was gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.interface import PAD_SLOT, AttentionBackend, AttentionMetadata, AttentionPlan
from kernels.layout import Int32Array, Int64Array
from kernels.sharding import RankShard, StepShards
from target_service.pcp.group import PendingWork, RankGroup, Watch

# See `kernels.reference.kv_write.write_kv`.
WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(slots=True)
class _Flight:
    """A layer's exchange under way."""

    work: PendingWork
    gathered: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def index_gathered(shards: StepShards, rank: int, absent: int) -> Int64Array:
    """[P * padded_tokens], for each token that an exchange brings its index in the step; `absent` for those that the
    exchange must not write on this rank: padding, and tokens of whole rows, which the backend writes.
    """
    index = np.full(len(shards.ranks) * shards.padded_tokens, absent, dtype=np.int64)
    index[shards.restore_index] = np.arange(shards.num_tokens)
    begin = rank * shards.padded_tokens
    index[begin : begin + shards.ranks[rank].num_whole_tokens] = absent
    return index


def gathered_slots(shards: StepShards, rank: int, slots: Int64Array) -> Int64Array:
    """[P * padded_tokens], the slot of each token that an exchange brings, or PAD_SLOT. slots: [T], of the step."""
    return np.append(slots, PAD_SLOT)[index_gathered(shards, rank, len(slots))]


class KvExchange:
    """One step's exchanges, in the order of the layers. At most one is under way."""

    def __init__(
        self,
        group: RankGroup,
        padded_tokens: int,
        num_tokens: int,
        slots: torch.Tensor,
        write_kv: WriteKv,
        watch: Watch,
    ) -> None:
        """padded_tokens: of every rank's local batch; num_tokens: of this rank's. slots: [P * padded_tokens] int64, the
        cache slot of each token that an exchange brings, PAD_SLOT where it is not to be written.
        """
        self._group = group
        self._watch = watch
        self._padded_tokens = padded_tokens
        self._num_tokens = num_tokens
        self._slots = slots
        self._write_kv = write_kv
        # Two pairs of buffers: a layer's may still be on its way to the others when the next one's is filled.
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = 0
        self._flight: _Flight | None = None

    def start(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Send this rank's KV of a layer. k, v: [>= n, Hkv, D]. Ends the exchange before it."""
        self.finish()
        if len(self._buffers) < 2:
            local = k.new_empty((self._padded_tokens, 2, *k.shape[1:]))
            self._buffers.append((local, k.new_empty((self._group.size * self._padded_tokens, *local.shape[1:]))))
        local, gathered = self._buffers[self._turn]
        self._turn = 1 - self._turn
        local[: self._num_tokens, 0] = k[: self._num_tokens]
        local[: self._num_tokens, 1] = v[: self._num_tokens]
        with self._watch.running():
            work = self._group.start_all_gather(gathered, local)
        self._flight = _Flight(work, gathered, k_cache, v_cache)

    def finish(self) -> None:
        """Wait for the exchange under way, if any, and write what it brought."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with self._watch.running():
            flight.work.wait()
        self._write_kv(flight.gathered[:, 0], flight.gathered[:, 1], self._slots, flight.k_cache, flight.v_cache)


class PcpPlan:
    """One KV group's attention plan of one step on one rank. whole, pieces: None where the rank has no such rows."""

    def __init__(
        self, exchange: KvExchange, num_whole_tokens: int, whole: AttentionPlan | None, pieces: AttentionPlan | None
    ) -> None:
        self._exchange = exchange
        self._num_whole_tokens = num_whole_tokens
        self._whole = whole
        self._pieces = pieces

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan.run; the tokens are this rank's. A token of no row (an empty rank runs one) gets zeros."""
        self._exchange.start(k, v, k_cache, v_cache)
        cut = self._num_whole_tokens
        outputs: list[torch.Tensor] = []
        if self._whole is not None:
            outputs.append(self._whole.run(q[:cut], k[:cut], v[:cut], k_cache, v_cache))
        if self._pieces is not None:
            self._exchange.finish()
            outputs.append(self._pieces.run(q[cut:], k[cut:], v[cut:], k_cache, v_cache))
        if not outputs:
            return torch.zeros_like(q)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def plan_attention(
    exchange: KvExchange,
    shard: RankShard,
    slots: Int64Array,
    block_tables: Int32Array,
    whole_backends: Sequence[AttentionBackend],
    piece_backends: Sequence[AttentionBackend],
    device: torch.device,
) -> list[AttentionPlan]:
    """A plan for each KV group. slots: [T] of the whole step; block_tables: [R, B] of its rows. The backends of whole
    rows and those of pieces are not the same objects, since a plan is valid only until its backend's next one.
    """
    cut, tokens_cut = shard.num_whole_rows, shard.num_whole_tokens
    parts: list[AttentionMetadata | None] = []
    for first, last, written in (
        (0, cut, slots[shard.tokens[:tokens_cut]]),
        (cut, len(shard.rows), np.full(shard.num_tokens - tokens_cut, PAD_SLOT, dtype=np.int64)),
    ):
        parts.append(_metadata(shard, first, last, written, block_tables, device) if first < last else None)
    whole, pieces = parts
    return [
        PcpPlan(
            exchange,
            tokens_cut,
            None if whole is None else whole_backend.plan(whole),
            None if pieces is None else piece_backend.plan(pieces),
        )
        for whole_backend, piece_backend in zip(whole_backends, piece_backends, strict=True)
    ]


def _metadata(
    shard: RankShard, first: int, last: int, slots: Int64Array, block_tables: Int32Array, device: torch.device
) -> AttentionMetadata:
    starts = np.ascontiguousarray(shard.query_start_loc[first : last + 1] - shard.query_start_loc[first])
    seq_lens = np.ascontiguousarray(shard.seq_lens[first:last])
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=torch.from_numpy(block_tables[shard.rows[first:last]]).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        max_query_len=int(np.diff(starts).max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_np=starts,
        seq_lens_np=seq_lens,
    )
