"""How does one rank run its share of a step that was launched ahead, when no host knows where its rows stand?

Which token goes to which rank follows from the order: query lengths, and context lengths that are at most so. What the
token is, where it stands and where its KV goes, is on rank 0's device, and comes from there (`broadcast.py`). All that
the host adds are indices, in one upload a step. Every rank runs the same collectives whatever the rows turn out to be:
a row that does not run has PAD slots and no length, and its tokens are run for nothing.

A step comes in two parts: `prepare` has all that the host does, `enqueue` is what the device does, and can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.interface import AttentionBackend, AttentionMetadata, AttentionPlan
from kernels.kernel_set import kernels_for
from kernels.sharding import RankShard, StepShards, shard_step
from target_service.device.plan_buffer import to_device
from target_service.model import LoadedModel
from target_service.pcp.broadcast import StepData
from target_service.pcp.exchange import KvExchange, PcpPlan, index_gathered
from target_service.pcp.forward import GatherIndex, RowGather, ShardedOutput, index_gather
from target_service.pcp.group import RankGroup, Watch
from target_service.pcp.order import LaunchOrder, logit_tokens

_ALIGNMENT = 16  # bytes: kernels are compiled by whether a pointer has it


class LaunchForward:
    """One rank's model, KV cache and attention backends. Used by one thread, under one stream. Waits for no device,
    with NCCL; gloo does in its collectives.
    """

    def __init__(
        self, model: LoadedModel, piece_backends: Sequence[AttentionBackend], group: RankGroup, watch: Watch
    ) -> None:
        """piece_backends: of pieces, as the model's are of whole rows; none of either needs host lengths. Other
        objects: plans of both are in use at once.
        """
        self._decoder = model.decoder
        self._kv = model.kv
        self._whole_backends = model.attention_backends
        self._piece_backends = tuple(piece_backends)
        self._group = group
        self._token_work = model.token_work
        self._watch = watch
        self._write_kv = kernels_for(model.kv.device).write_kv

    @torch.inference_mode()
    def run(self, order: LaunchOrder, fill: Callable[[StepData], None] | None) -> ShardedOutput:
        """Enqueue this rank's share of a step that has tokens. fill: writes the step's data, on rank 0 alone."""
        return self.enqueue(self.prepare(order), fill, self._watch)

    @torch.inference_mode()
    def prepare(self, order: LaunchOrder) -> Prepared:
        """Deal a step that has tokens, and put this rank's indices on the device."""
        group, device = self._group, self._kv.device
        shards = shard_step(order.context_lens, order.query_lens, order.splits, group.size, self._token_work)
        wanted = logit_tokens(order.query_lens, order.num_logits)
        logits = index_gather(shards, group.rank, wanted) if len(wanted) else None
        every = None
        if order.hidden_layers:
            every = index_gather(shards, group.rank, np.arange(order.num_tokens, dtype=np.int64))
        indices = _Indices.of(order, shards, group.rank, logits, every, device)
        return Prepared(order, StepData.empty(order, device), shards, logits, every, indices)

    @torch.inference_mode()
    def enqueue(self, prepared: Prepared, fill: Callable[[StepData], None] | None, watch: Watch) -> ShardedOutput:
        """Put it on the device's current stream, any number of times. Nothing here uploads, reads back or depends on
        what is on the device. watch: of the collectives; one that records nothing while this is captured.
        """
        group, order, data, indices = self._group, prepared.order, prepared.data, prepared.indices
        shard = prepared.shards.ranks[group.rank]
        if fill is not None:
            fill(data)
        with watch.running():
            group.broadcast(data.words)
        exchange = KvExchange(
            group,
            prepared.shards.padded_tokens,
            shard.num_tokens,
            data.slots.index_select(0, indices.gathered),
            self._write_kv,
            watch,
        )
        whole = _part(indices.whole, data, shard, 0, shard.num_whole_rows)
        pieces = _part(indices.pieces, data, shard, shard.num_whole_rows, len(shard.rows))
        plans: list[AttentionPlan] = [
            PcpPlan(
                exchange,
                shard.num_whole_tokens,
                None if whole is None else whole_backend.plan(whole),
                None if pieces is None else piece_backend.plan(pieces),
            )
            for whole_backend, piece_backend in zip(self._whole_backends, self._piece_backends, strict=True)
        ]
        output = self._decoder.forward(
            data.input_ids.index_select(0, indices.tokens),
            data.positions.index_select(0, indices.tokens),
            plans,
            self._kv,
            order.hidden_layers,
        )
        exchange.finish()
        logit_hidden = self._gather(prepared.logits, indices.logits, output.hidden, watch)
        captured = self._gather(prepared.every, indices.every, output.captured, watch)
        return ShardedOutput(logit_hidden, captured, prepared.shards)

    def _gather(
        self,
        index: GatherIndex | None,
        where: tuple[torch.Tensor, torch.Tensor] | None,
        local: torch.Tensor | None,
        watch: Watch,
    ) -> torch.Tensor | None:
        if index is None or where is None or local is None:
            return None
        return RowGather(self._group, index.padded, *where, watch).run(local)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step as the host has dealt it, and the device memory that comes with that. A graph that captured the step reads
    and writes it, so it must live as long. logits, every: what rank 0 gets, None where nobody needs any.
    """

    order: LaunchOrder
    data: StepData
    shards: StepShards
    logits: GatherIndex | None
    every: GatherIndex | None
    indices: _Indices


@dataclass(frozen=True, slots=True)
class _Part:
    """L local rows that are whole, or pieces. starts: [L + 1] int32. rows: [L], of the step. tails: [L] int32, query
    tokens of the step's row behind the local one. slots: [n], each token's place among the step's slots.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    tails: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Indices:
    """What the host knows of this rank's share, on the device. All int64 but where said.

    tokens: [max(n, 1)], each local token's index in the step; an empty rank runs one, of no row, so that it is in every
    exchange. gathered: [P * padded], see `index_gathered`. logits, every: rows and places for each `RowGather`.
    """

    tokens: torch.Tensor
    gathered: torch.Tensor
    whole: _Part
    pieces: _Part
    logits: tuple[torch.Tensor, torch.Tensor] | None
    every: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(
        cls,
        order: LaunchOrder,
        shards: StepShards,
        rank: int,
        logits: GatherIndex | None,
        every: GatherIndex | None,
        device: torch.device,
    ) -> _Indices:
        """One upload of all of it."""
        shard, absent = shards.ranks[rank], order.num_tokens
        cut = shard.num_whole_tokens
        tails = order.query_lens[shard.rows] - shard.starts - shard.query_lens
        arrays = [
            shard.tokens if shard.num_tokens else np.zeros(1, dtype=np.int64),
            index_gathered(shards, rank, absent),
        ]
        for first, last, slots in (
            (0, shard.num_whole_rows, shard.tokens[:cut]),
            # Pieces are written with the others' tokens, by the exchange.
            (shard.num_whole_rows, len(shard.rows), np.full(shard.num_tokens - cut, absent, dtype=np.int64)),
        ):
            starts = shard.query_start_loc[first : last + 1] - shard.query_start_loc[first]
            arrays += [starts, shard.rows[first:last], tails[first:last].astype(np.int32), slots]
        for index in (logits, every):
            if index is not None:
                arrays += [index.rows, index.place]
        tensors = iter(_upload(arrays, device))
        tokens, gathered = next(tensors), next(tensors)
        whole, pieces = (_Part(*(next(tensors) for _ in range(4))) for _ in range(2))
        found = [None if index is None else (next(tensors), next(tensors)) for index in (logits, every)]
        return cls(tokens, gathered, whole, pieces, *found)


def _part(part: _Part, data: StepData, shard: RankShard, first: int, last: int) -> AttentionMetadata | None:
    """Attention's metadata of local rows first .. last - 1; None where there are none.

    Nothing is a view into something else: kernels are compiled by a pointer's alignment.
    """
    if first == last:
        return None
    # A piece ends before its row does; a row that does not run has no length, nor have its pieces.
    seq_lens = (data.seq_lens.index_select(0, part.rows) - part.tails).clamp_(min=0)
    return AttentionMetadata(
        query_start_loc=part.starts,
        seq_lens=seq_lens,
        block_tables=data.block_tables.index_select(0, part.rows),
        slot_mapping=data.slots.index_select(0, part.slots),
        max_query_len=int(shard.query_lens[first:last].max()),
        max_seq_len=int(shard.seq_lens[first:last].max()),
    )


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 and int64 arrays on the device, by one copy that the host does not wait for."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(end, dtype=np.uint8)
    for array, offset in zip(arrays, offsets, strict=True):
        packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    there = to_device(packed, device)
    return [
        there[offset : offset + array.nbytes].view(torch.int32 if array.dtype == np.int32 else torch.int64)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
