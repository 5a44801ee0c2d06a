"""How does rank 0 share out the forward of a step that it launches ahead?

The device runner's `StepForward`, with the forward alone over ranks: what the host knows of the batch becomes an order
on the board, what the device has prepared is broadcast, and rank 0 runs its share like any other rank. Everything
before it (drafts, per-seat state) and behind it (verdicts, ring entry) is rank 0's, as on a target of one rank. Once
the order is out there is no way back: an error in between ends the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.decoder import Decoder
from engine.errors import RanksLost
from engine.kv_cache import KVCache
from kernels.kernel_set import KernelSet
from kernels.layout import PAD_SLOT, blocks_needed
from target_service.acceptance import SyntheticAcceptance
from target_service.device.buffers import StepBuffers, StepShape
from target_service.device.forward import Batch, HostRows, StepForward, StepOutput
from target_service.device.plan_buffer import PlanBuffer
from target_service.messages import RankLoad
from target_service.pcp.broadcast import StepData, columns_of
from target_service.pcp.laps import LapWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.order import LaunchOrder
from target_service.pcp.ranks import Ranks


class RankStepForward(StepForward):
    """A StepForward over ranks. Nothing is captured: steps of all sorts run as they are, one launch after the other."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        kernels: KernelSet,
        buffers: StepBuffers,
        plans: PlanBuffer,
        seat_tables: torch.Tensor,
        block_size: int,
        max_model_len: int,
        graph_rows: Sequence[int],
        synthetic: SyntheticAcceptance | None,
        ranks: Ranks,
        launched: LaunchForward,
        watch: LapWatch,
        timeout_s: float,
    ) -> None:
        """graph_rows: the row counts that are warmed up. launched: this rank's share, and watch its Watch. timeout_s:
        how long the board may have no room.
        """
        super().__init__(
            decoder,
            kv,
            (),
            kernels,
            buffers,
            plans,
            seat_tables,
            block_size,
            max_model_len,
            graph_rows,
            False,
            synthetic,
        )
        self._warmed_rows = tuple(sorted(set(graph_rows)))
        self._ranks = ranks
        self._launched = launched
        self._watch = watch
        self._timeout_s = timeout_s
        self._pad = torch.full((1,), PAD_SLOT, dtype=torch.int64, device=decoder.device)
        self._seq = 0

    def padded_rows(self, num_rows: int, query_len: int) -> int | None:
        """None: nothing is captured."""
        return None

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """The row counts that are warmed up."""
        return self._warmed_rows

    def _run(self, shape: StepShape, hidden_layers: tuple[int, ...], batch: Batch | None) -> StepOutput:
        """Forward over all ranks, and logits. RanksLost when a rank is gone, or this one failed after the others had
        begun.
        """
        if shape.num_tokens == 0:
            return StepOutput(None, None)
        assert batch is not None  # no step is padded, so none is uniform
        if self._ranks.lost:
            raise RanksLost("a rank is gone")
        order = make_launch_order(batch.host, hidden_layers, self._block_size)
        self._seq += 1
        try:
            self._ranks.board.publish(order, self._seq, self._timeout_s, lambda: self._ranks.lost)
            output = self._launched.run(order, lambda data: self._fill(data, shape))
        except RanksLost:
            raise
        except Exception as error:  # whatever it is, the others cannot go on without this rank
            raise RanksLost(f"step {self._seq} over {self._ranks.board.num_ranks} ranks failed: {error}") from error
        loads = tuple(RankLoad(shard.num_tokens, shard.work) for shard in output.shards.ranks)
        hidden = output.logit_hidden
        logits = None if hidden is None else self.decoder.logits(hidden)
        return StepOutput(output.captured, logits, loads, self._watch.cut())

    def _fill(self, data: StepData, shape: StepShape) -> None:
        data.fill(shape, self._pad)


def make_launch_order(rows: HostRows, hidden_layers: tuple[int, ...], block_size: int) -> LaunchOrder:
    """What the other ranks must hear of a batch from the host."""
    context_lens = np.array(rows.context_lens, dtype=np.int64)
    query_lens = np.array(rows.query_lens, dtype=np.int64)
    longest = int((context_lens + query_lens).max(initial=0))
    return LaunchOrder(
        context_lens=context_lens,
        query_lens=query_lens,
        num_logits=np.array(rows.num_logits, dtype=np.int64),
        splits=np.array(rows.is_prompt, dtype=np.bool_),
        num_columns=columns_of(blocks_needed(longest, block_size)),
        hidden_layers=hidden_layers,
    )
