"""How does one rank run its share of a step?

From a StepOrder to hidden states: shard, forward over the local batch, then gather what somebody needs to rank 0 and
put it back in the step's order. All ranks call `run` with the same order; only rank 0 gets results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.decoder import ForwardOutput
from kernels.attention.interface import AttentionBackend, AttentionPlan
from kernels.kernel_set import kernels_for
from kernels.layout import Int64Array, make_positions, make_query_start_loc, make_slot_mapping
from kernels.sharding import RankShard, StepShards, shard_step
from target_service.model import LoadedModel
from target_service.pcp.exchange import KvExchange, gathered_slots, plan_attention
from target_service.pcp.group import RankGroup, Stopwatch, Watch
from target_service.pcp.order import StepOrder, logit_tokens


@dataclass(frozen=True, slots=True)
class ShardedOutput:
    """What rank 0 has of a step. logit_hidden: [N, H] of the tokens that need logits; captured: [T, A * H]. None where
    nobody needs any, and on the other ranks.
    """

    logit_hidden: torch.Tensor | None
    captured: torch.Tensor | None
    shards: StepShards


@dataclass(frozen=True, slots=True)
class GatherIndex:
    """Which rows of local tensors rank 0 gets. padded: how many each rank sends. rows: those of this rank's tokens.
    place: of each wanted row, in what arrives.
    """

    padded: int
    rows: Int64Array
    place: Int64Array


def index_gather(shards: StepShards, rank: int, tokens: Int64Array) -> GatherIndex:
    """tokens: the step's tokens whose rows are wanted, ascending."""
    wanted = np.zeros(shards.num_tokens, dtype=np.bool_)
    wanted[tokens] = True
    of_rank = [np.flatnonzero(wanted[shard.tokens]) for shard in shards.ranks]
    padded = max(len(rows) for rows in of_rank)
    place = np.empty(shards.num_tokens, dtype=np.int64)
    for source, (shard, rows) in enumerate(zip(shards.ranks, of_rank, strict=True)):
        place[shard.tokens[rows]] = source * padded + np.arange(len(rows))
    return GatherIndex(padded, of_rank[rank], place[tokens])


class RowGather:
    """Brings rows of local tensors to rank 0, in the step's order. Made before the forward, so that nothing is uploaded
    between it and the collective.
    """

    def __init__(self, group: RankGroup, padded: int, rows: torch.Tensor, place: torch.Tensor, watch: Watch) -> None:
        """See GatherIndex; the indices are on the device."""
        self._group = group
        self._watch = watch
        self._padded = padded
        self._rows = rows
        self._place = place

    def run(self, local: torch.Tensor) -> torch.Tensor | None:
        """local: [>= n, H] of this rank's tokens. Returns [len(tokens), H] on rank 0."""
        send = local.new_zeros((self._padded, local.shape[1]))
        send[: self._rows.shape[0]] = local.index_select(0, self._rows)
        with self._watch.running():
            gathered = self._group.gather(send)
        return None if gathered is None else gathered.index_select(0, self._place)


class RankForward:
    """One rank's model, KV cache and attention backends. Used by one thread."""

    def __init__(self, model: LoadedModel, piece_backends: Sequence[AttentionBackend], group: RankGroup) -> None:
        """piece_backends: of pieces, as the model's are of whole rows; other objects: plans of both are in use at
        once.
        """
        self._decoder = model.decoder
        self._kv = model.kv
        self._whole_backends = model.attention_backends
        self._piece_backends = tuple(piece_backends)
        self._group = group
        self._max_model_len = model.max_model_len
        self._token_work = model.token_work
        self._watch = Stopwatch(model.kv.device)

    def take_collective_ms(self) -> float:
        """How long this rank has stood in collectives since the last call; see Stopwatch.take_ms."""
        return self._watch.take_ms()

    def forget_times(self) -> None:
        """Count from now on: for ranks that nobody asks."""
        self._watch.reset()

    @torch.inference_mode()
    def run(self, order: StepOrder) -> ShardedOutput:
        """Run this rank's share of a step that has tokens."""
        group, device = self._group, self._kv.device
        shards = shard_step(order.context_lens, order.query_lens, order.splits, group.size, self._token_work)
        shard = shards.ranks[group.rank]
        slots = make_slot_mapping(
            order.block_tables,
            make_positions(order.context_lens, order.query_lens),
            make_query_start_loc(order.query_lens),
            self._kv.block_size,
            self._max_model_len,
            order.num_tokens,
        )
        wanted = logit_tokens(order.query_lens, order.num_logits)
        gather_logits = self._gather(shards, wanted) if len(wanted) else None
        gather_all = None
        if order.hidden_layers:
            gather_all = self._gather(shards, np.arange(order.num_tokens, dtype=np.int64))
        exchange = KvExchange(
            group,
            shards.padded_tokens,
            shard.num_tokens,
            torch.from_numpy(gathered_slots(shards, group.rank, slots)).to(device),
            kernels_for(device).write_kv,
            self._watch,
        )
        plans = plan_attention(
            exchange, shard, slots, order.block_tables, self._whole_backends, self._piece_backends, device
        )
        output = self._forward(order, shard, plans)
        exchange.finish()
        logit_hidden = None if gather_logits is None else gather_logits.run(output.hidden)
        captured = None if gather_all is None or output.captured is None else gather_all.run(output.captured)
        return ShardedOutput(logit_hidden, captured, shards)

    def _gather(self, shards: StepShards, tokens: Int64Array) -> RowGather:
        index, device = index_gather(shards, self._group.rank, tokens), self._kv.device
        rows, place = (torch.from_numpy(indices).to(device) for indices in (index.rows, index.place))
        return RowGather(self._group, index.padded, rows, place, self._watch)

    def _forward(self, order: StepOrder, shard: RankShard, plans: Sequence[AttentionPlan]) -> ForwardOutput:
        """The local batch. An empty rank runs one token of no row, so that it is in every exchange."""
        input_ids, positions = order.input_ids[shard.tokens], shard.positions
        if not shard.num_tokens:
            input_ids = positions = np.zeros(1, dtype=np.int64)
        device = self._kv.device
        return self._decoder.forward(
            torch.from_numpy(input_ids).to(device),
            torch.from_numpy(positions).to(device),
            plans,
            self._kv,
            order.hidden_layers,
        )
