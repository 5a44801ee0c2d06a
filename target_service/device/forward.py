"""What runs on the device between a step's drafts and its logits, or, where every row is greedy, its verdicts?

Uniform steps (only decode rows, all of one length) are padded to a captured number of rows and run as one CUDA graph;
any other runs as it is. Both call the same functions over the same buffers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.decoder import Decoder
from engine.graphs import GraphCache
from engine.kv_cache import KVCache
from kernels.attention.interface import AttentionBackend
from kernels.kernel_set import KernelSet
from target_service.acceptance import SyntheticAcceptance
from target_service.config import TargetConfig
from target_service.device.buffers import StepBuffers, StepShape
from target_service.device.plan_buffer import PlanBuffer
from target_service.messages import RankLoad
from target_service.pcp.laps import Lap


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a batch's R rows, for whoever shares them out.

    context_lens: at most so, and exact for prompt chunks. query_lens: 0 for rows that are not launched. num_logits: how
    many of a row's last tokens need logits.
    """

    context_lens: list[int]
    query_lens: list[int]
    num_logits: list[int]
    is_prompt: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step that is not uniform brings beside its shape.

    starts: [R + 1] int32, where each row's tokens begin. is_prompt [R] bool, prompt_starts [R] int64 and prompt_tokens:
    see `prepare_target_inputs`. logit_rows: [N] int64, the tokens whose logits are needed.
    """

    starts: torch.Tensor
    is_prompt: torch.Tensor
    prompt_starts: torch.Tensor
    prompt_tokens: torch.Tensor
    logit_rows: torch.Tensor
    host: HostRows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """captured: [T, A * H] or None. logits: [N, V] float32, None where no row samples or verdicts are committed.

    loads, lap: what each rank runs, and the time in collectives; on a target of one rank there is neither, and of a
    uniform step there is no lap.
    """

    captured: torch.Tensor | None
    logits: torch.Tensor | None
    loads: tuple[RankLoad, ...] = ()
    lap: Lap | None = None


# Sets of hidden layers, the empty one included, whose graphs are kept: each drafter brings its own, and may come again
# with another.
MAX_LAYER_SETS = 4


def most_graphs(num_row_counts: int, max_drafts: int, num_forms: int = 1) -> int:
    """How many graphs are kept of uniform steps: for each row count, length and form, to the end and to the logits."""
    return 2 * MAX_LAYER_SETS * num_row_counts * (max_drafts + 1) * num_forms


def captured_rows(config: TargetConfig) -> tuple[int, ...]:
    """The row counts that uniform steps are padded to, ascending: those that this many seats can have a use for."""
    return tuple(rows for rows in sorted(set(config.graph_rows)) if rows < 2 * config.num_seats)


class StepForward:
    """Owner of the model, its cache and the graphs. Used by one thread, under one stream. Over ranks it is
    `pcp.step_forward.RankStepForward`.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        backends: Sequence[AttentionBackend],
        kernels: KernelSet,
        buffers: StepBuffers,
        plans: PlanBuffer,
        seat_tables: torch.Tensor,
        block_size: int,
        max_model_len: int,
        graph_rows: Sequence[int],
        cuda_graphs: bool,
        synthetic: SyntheticAcceptance | None,
        graphs: GraphCache | None = None,
    ) -> None:
        """backends: one per KV group, none of which needs host lengths. seat_tables: [1, S, B] int32. graphs: where
        captured steps are kept; None: as many as there can be of one form.
        """
        self.decoder = decoder
        # Without graphs there is nothing to be gained by padding.
        self._graph_rows = sorted(set(graph_rows)) if cuda_graphs else []
        if graphs is None:
            num_graphs = most_graphs(len(self._graph_rows), buffers.sizes.max_drafts)
            graphs = GraphCache(decoder.device, num_graphs, cuda_graphs)
        self.graphs = graphs
        self._kv = kv
        self._backends = tuple(backends)
        self._kernels = kernels
        self._buffers = buffers
        self._plans = plans
        self._seat_tables = seat_tables
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._synthetic = synthetic

    def padded_rows(self, num_rows: int, query_len: int) -> int | None:
        """How many rows a uniform step of num_rows is padded to; None: such a step runs as it is."""
        place = bisect.bisect_left(self._graph_rows, num_rows)
        if num_rows == 0 or place == len(self._graph_rows):
            return None
        padded = self._graph_rows[place]
        sizes = self._buffers.sizes
        fits = padded <= sizes.max_rows and padded * query_len <= sizes.max_tokens and query_len <= sizes.max_drafts + 1
        return padded if fits else None

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """The row counts that are captured."""
        return tuple(self._graph_rows)

    def uniform(
        self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool, context_lens: Sequence[int]
    ) -> StepOutput:
        """A uniform step, through its graph. greedy: to the end, verdicts committed, without logits; else to them.
        context_lens: see Launch; for whoever shares the rows out.
        """
        key = (shape.num_rows, shape.query_stride, hidden_layers, greedy)
        return self.graphs.run(key, self._alone(shape, hidden_layers, greedy))

    def capture(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> None:
        """Capture what `uniform` runs. The plan on the device must have no row with a seat."""
        key = (shape.num_rows, shape.query_stride, hidden_layers, greedy)
        self.graphs.capture(key, self._alone(shape, hidden_layers, greedy))

    def ragged(self, shape: StepShape, batch: Batch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Any other step, to its logits."""
        self._prepare(shape, batch.starts, batch.is_prompt, batch.prompt_starts, batch.prompt_tokens)
        return self._run(shape, hidden_layers, batch)

    def commit_greedy(self, shape: StepShape, logits: torch.Tensor) -> None:
        """Verify and commit a uniform step of greedy rows."""
        starts = self._buffers.uniform_starts(shape.num_rows, shape.query_stride)
        verdict = self._kernels.verify_greedy(logits, starts, shape.drafts)
        if self._synthetic is not None:
            seeds = self._plans.first(shape.num_rows)["seeds"]
            verdict = self._synthetic.apply(verdict, shape.drafts, seeds, shape.start_positions)
        self.commit(shape, verdict.tokens, verdict.num_sampled)

    def commit(self, shape: StepShape, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Commit the accept rule's verdicts and make the table that the host reads."""
        buffers, rows = self._buffers, self._plans.first(shape.num_rows)
        self._kernels.commit_rows(
            tokens,
            num_sampled,
            shape.seats,
            rows["query_lens"],
            rows["known_lens"],
            shape.num_drafts,
            buffers.missed,
            buffers.context_lens,
            buffers.seat_anchors,
            shape.query_lens,
            shape.num_sampled,
            shape.num_rejected,
            shape.anchors,
            shape.table,
        )

    def _alone(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> Callable[[], StepOutput]:
        return self._uniform_step(shape, greedy, lambda: self._run(shape, hidden_layers, None))

    def _uniform_step(self, shape: StepShape, greedy: bool, run: Callable[[], StepOutput]) -> Callable[[], StepOutput]:
        """What a graph captures of a uniform step. run: forward and logits, as `_run` does."""
        buffers = self._buffers
        starts = buffers.uniform_starts(shape.num_rows, shape.query_stride)

        def step() -> StepOutput:
            prompts = buffers.uniform_prompts[: shape.num_rows]
            self._prepare(shape, starts, prompts, self._plans.rows["prompt_starts"], buffers.no_prompt)
            output = run()
            if not greedy or output.logits is None:
                return output
            self.commit_greedy(shape, output.logits)
            # What a graph returns it keeps: logits are too big to be kept for nothing.
            return replace(output, logits=None)

        return step

    def _prepare(
        self,
        shape: StepShape,
        starts: torch.Tensor,
        is_prompt: torch.Tensor,
        prompt_starts: torch.Tensor,
        prompt_tokens: torch.Tensor,
    ) -> None:
        """Input ids, positions, and attention's metadata, from what `take_drafts` has decided."""
        buffers = self._buffers
        self._kernels.prepare_target_inputs(
            buffers.context_lens,
            buffers.seat_anchors,
            shape.seats,
            prompt_tokens,
            prompt_starts,
            shape.drafts,
            starts,
            is_prompt,
            shape.input_ids,
            shape.positions,
        )
        self._kernels.fill_metadata(
            shape.seats,
            starts,
            shape.seq_lens,
            shape.positions,
            self._seat_tables,
            (self._block_size,),
            self._max_model_len,
            shape.out_query_start_loc,
            shape.out_seq_lens,
            shape.out_block_tables,
            shape.out_slots,
        )

    def _run(self, shape: StepShape, hidden_layers: tuple[int, ...], batch: Batch | None) -> StepOutput:
        """Forward and logits. batch: None for a uniform step, all of whose tokens have logits."""
        if shape.num_tokens == 0:
            return StepOutput(None, None)
        plans = [backend.plan(shape.metadata) for backend in self._backends]
        output = self.decoder.forward(shape.input_ids, shape.positions, plans, self._kv, hidden_layers)
        hidden = output.hidden
        if batch is not None:
            if batch.logit_rows.shape[0] == 0:
                return StepOutput(output.captured, None)
            hidden = hidden.index_select(0, batch.logit_rows)
        return StepOutput(output.captured, self.decoder.logits(hidden))
