"""How does rank 0 share out the forward of a step that it launches ahead?

The device runner's `StepForward`, with the forward alone over ranks: what the host knows of the batch becomes an order
on the board, what the device has prepared is broadcast, and rank 0 runs its share like any other rank. Everything
before it (drafts, per-seat state) and behind it (verdicts, ring entry) is rank 0's, as on a target of one rank. Once
the order is out there is no way back: an error in between ends the target.

Uniform steps are captured on every rank, with the collectives in them (`captured.py`). Their order, with the key that
rank 0's graph has, goes out before rank 0 enters the graph, or makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.decoder import Decoder
from engine.errors import RanksLost
from engine.graphs import GraphCache
from engine.kv_cache import KVCache
from kernels.kernel_set import KernelSet
from kernels.layout import PAD_SLOT, blocks_needed
from target_service.acceptance import SyntheticAcceptance
from target_service.device.buffers import StepBuffers, StepShape
from target_service.device.forward import Batch, HostRows, StepForward, StepOutput
from target_service.device.plan_buffer import PlanBuffer
from target_service.messages import RankLoad
from target_service.pcp.broadcast import StepData, columns_of
from target_service.pcp.captured import column_sizes, run_as_ordered, uniform_loads
from target_service.pcp.laps import LapWatch, NoWatch
from target_service.pcp.launched import LaunchForward, Prepared
from target_service.pcp.order import LaunchOrder, Way
from target_service.pcp.ranks import Ranks


class RankStepForward(StepForward):
    """A StepForward over ranks."""

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
        captures: bool,
        graphs: GraphCache,
        synthetic: SyntheticAcceptance | None,
        ranks: Ranks,
        launched: LaunchForward,
        watch: LapWatch,
        timeout_s: float,
    ) -> None:
        """graph_rows: the row counts that are warmed up. captures: uniform steps are padded to them and captured, which
        the group must be able to be; else steps of all sorts run as they are. graphs: `make_graphs`, like every
        rank's. launched: this rank's share, and watch its Watch. timeout_s: how long the board may have no room.
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
            captures,
            synthetic,
            graphs,
        )
        self._warmed_rows = tuple(sorted(set(graph_rows)))
        self._column_sizes = column_sizes(seat_tables.shape[-1])
        self._ranks = ranks
        self._launched = launched
        self._watch = watch
        self._timeout_s = timeout_s
        self._pad = torch.full((1,), PAD_SLOT, dtype=torch.int64, device=decoder.device)
        self._seq = 0

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """The row counts that are warmed up."""
        return self._warmed_rows

    def uniform(
        self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool, context_lens: Sequence[int]
    ) -> StepOutput:
        """See StepForward. RanksLost as for any other step."""
        needed = blocks_needed(max(context_lens, default=0) + shape.query_stride, self._block_size)
        columns = next((size for size in self._column_sizes if size >= needed), self._column_sizes[-1])
        found = self._captured(shape, hidden_layers, greedy, columns, Way.UNIFORM)
        assert found is not None  # it is only where a step is captured ahead of its time
        output, prepared = found
        return replace(output, loads=uniform_loads(prepared.shards, context_lens, shape.query_stride))

    def capture(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> None:
        """See StepForward: on all ranks, for rows of any length."""
        for columns in self._column_sizes:
            self._captured(shape, hidden_layers, greedy, columns, Way.CAPTURE)

    def _captured(
        self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool, columns: int, way: Way
    ) -> tuple[StepOutput, Prepared] | None:
        order = LaunchOrder.uniform(
            shape.num_rows, shape.query_stride, columns, hidden_layers, self._block_size, way, greedy
        )
        key = order.key
        known = key in self.graphs
        if way is Way.CAPTURE and (known or not self.graphs.enabled):
            return None  # on any rank there is nothing to be done
        with self._ordered(order):
            # Not in the function, which must upload nothing.
            prepared = None if known else self._launched.prepare(order)

            def step() -> tuple[StepOutput, Prepared]:
                assert prepared is not None  # with a graph this is not called
                run = self._uniform_step(shape, greedy, lambda: self._share(shape, prepared))
                return run(), prepared  # what a graph returns it keeps, and so what it reads and writes

            return run_as_ordered(self.graphs, way, key, step)

    def _share(self, shape: StepShape, prepared: Prepared) -> StepOutput:
        """Forward over all ranks, and logits, of a uniform step. Times inside a graph nobody could read."""
        output = self._launched.enqueue(prepared, lambda data: self._fill(data, shape), NoWatch())
        assert output.logit_hidden is not None  # this is rank 0, and every token has logits
        return StepOutput(output.captured, self.decoder.logits(output.logit_hidden))

    def _run(self, shape: StepShape, hidden_layers: tuple[int, ...], batch: Batch | None) -> StepOutput:
        """Forward over all ranks, and logits. RanksLost when a rank is gone, or this one failed after the others had
        begun.
        """
        if shape.num_tokens == 0:
            return StepOutput(None, None)
        assert batch is not None  # uniform steps come another way
        order = make_launch_order(batch.host, hidden_layers, self._block_size)
        with self._ordered(order):
            output = self._launched.run(order, lambda data: self._fill(data, shape))
        hidden = output.logit_hidden
        logits = None if hidden is None else self.decoder.logits(hidden)
        loads = tuple(RankLoad(shard.num_tokens, shard.work) for shard in output.shards.ranks)
        return StepOutput(output.captured, logits, loads, self._watch.cut())

    @contextlib.contextmanager
    def _ordered(self, order: LaunchOrder) -> Iterator[None]:
        """The other ranks have the order when this is entered; what is inside is this rank's share."""
        if self._ranks.lost:
            raise RanksLost("a rank is gone")
        self._seq += 1
        try:
            self._ranks.board.publish(order, self._seq, self._timeout_s, lambda: self._ranks.lost)
            yield
        except RanksLost:
            raise
        except Exception as error:  # whatever it is, the others cannot go on without this rank
            if (loss := self._ranks.loss_behind(error)) is not None:
                raise RanksLost(f"step {self._seq}: {loss}") from None
            raise RanksLost(f"step {self._seq} over {self._ranks.board.num_ranks} ranks failed: {error}") from error

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
