"""How does rank 0 run a step over all ranks, and how does it get them?

With host execution by the runner's `BatchForward`: what the batch says becomes an order, the order goes to the board,
and rank 0 runs its own share of it like any other rank. (With device execution: `step_forward.py`.)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.model_config import ModelConfig
from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionBackend
from kernels.layout import blocks_needed
from target_service.batch import StepBatch, StepRow
from target_service.config import TargetConfig
from target_service.forward import StepOutput
from target_service.messages import RankLoad
from target_service.model import LoadedModel, make_backends
from target_service.pcp.forward import RankForward
from target_service.pcp.group import RankGroup
from target_service.pcp.laps import LapWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.lead import Lead
from target_service.pcp.order import StepOrder, most_bytes, most_launch_bytes, table_columns
from target_service.pcp.ranks import Ranks
from target_service.pcp.settings import collective_timeout_s
from target_service.pcp.warm import warm_up


class ShardedForward:
    """A BatchForward over ranks. Used by one thread."""

    def __init__(self, lead: Lead, forward: RankForward, blocks: RequestBlocks) -> None:
        self._lead = lead
        self._forward = forward
        self._blocks = blocks

    def run(self, batch: StepBatch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """See BatchForward. RanksLost when a rank is gone, or this one failed after the others had begun."""
        order = make_order(batch, self._blocks, hidden_layers)
        with self._lead.step(order):
            output = self._forward.run(order)
        loads = tuple(RankLoad(shard.num_tokens, shard.work) for shard in output.shards.ranks)
        return StepOutput(output.logit_hidden, output.captured, loads)

    def take_collective_ms(self) -> float:
        """See BatchForward."""
        return self._forward.take_collective_ms()


def make_order(batch: StepBatch, blocks: RequestBlocks, hidden_layers: tuple[int, ...]) -> StepOrder:
    """What the other ranks must know of a batch. Read from the host's side of it: nothing waits for a device."""
    rows = [row for row in batch.rows if row.runs]
    sessions = [session for row in rows if (session := row.session) is not None]
    context_lens = np.array([session.context_len for session in sessions], dtype=np.int64)
    query_lens = np.array([row.query_len for row in rows], dtype=np.int64)
    seats = np.array([session.seat for session in sessions], dtype=np.int64)
    columns = table_columns(context_lens, query_lens, blocks.pool.block_size)
    input_ids: list[int] = []
    for row in rows:
        input_ids += _input_ids(row)
    return StepOrder(
        context_lens=context_lens,
        query_lens=query_lens,
        num_logits=np.array([row.num_logits for row in rows], dtype=np.int64),
        splits=np.array([row.is_prompt for row in rows], dtype=np.bool_),
        input_ids=np.array(input_ids, dtype=np.int64),
        block_tables=blocks.table_np[seats, :columns],
        hidden_layers=hidden_layers,
    )


def _input_ids(row: StepRow) -> list[int]:
    """A row's tokens, as `kernels.reference.target_inputs` has them: absent drafts run as id 0."""
    session = row.session
    assert session is not None  # a row that runs has one
    if row.is_prompt:
        return session.tokens[session.context_len : session.context_len + row.query_len]
    return [session.tokens[-1], *row.drafts] + [0] * (row.query_len - 1 - len(row.drafts))


def start_ranks(config: TargetConfig, directory: Path) -> Ranks | None:
    """The other ranks, loading; None on a target of one. ConfigError where ranks cannot be; ModelError when the
    model's config cannot be read.
    """
    if config.pcp_size == 1:
        return None
    model = ModelConfig.from_directory(directory)
    max_blocks = blocks_needed(config.max_model_len or model.max_model_len, config.block_size)
    order_bytes = max(
        most_bytes(config.num_seats, config.max_step_tokens, max_blocks, model.num_layers),
        # Warming up takes rows that no plan has.
        most_launch_bytes(2 * config.num_seats, model.num_layers),
    )
    return Ranks(config, directory, order_bytes, board_depth(config))


def board_depth(config: TargetConfig) -> int:
    """Orders that the board holds: with device execution as many as steps may be under way, or publishing one would
    wait. Made before the model is loaded, whose attention may yet decide for host execution.
    """
    if config.execution == "host" or (config.execution == "auto" and config.device == "cpu"):
        return 2
    return config.channel_depth


def join_ranks(ranks: Ranks, config: TargetConfig, model: LoadedModel, blocks: RequestBlocks) -> ShardedForward:
    """Rank 0's forward with host execution, once all ranks are there. RanksLost when they do not come."""
    piece_backends, group = _join(ranks, config, model, on_device=False)
    return ShardedForward(Lead(ranks, config.pcp_timeout_s), RankForward(model, piece_backends, group), blocks)


def join_launching_ranks(ranks: Ranks, config: TargetConfig, model: LoadedModel, watch: LapWatch) -> LaunchForward:
    """Rank 0's share of each forward with device execution, once all ranks are there. RanksLost when they do not come.
    watch: of the time in collectives.
    """
    piece_backends, group = _join(ranks, config, model, on_device=True)
    return LaunchForward(model, piece_backends, group, watch)


def _join(
    ranks: Ranks, config: TargetConfig, model: LoadedModel, on_device: bool
) -> tuple[tuple[AttentionBackend, ...], RankGroup]:
    """Meet the others, compiled and ready. Returns also the backends of pieces."""
    piece_backends = make_backends(config, model.decoder)
    if model.decoder.device.type == "cuda":
        warm_up(model, (model.attention_backends, piece_backends), config.max_step_tokens)
    return piece_backends, ranks.join(model.decoder.device, collective_timeout_s(config, on_device))
