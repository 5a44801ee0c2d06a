"""What does a step do on the device before its forward, and behind its logits?

The same whoever runs the forward between them, one rank or several: input ids, positions and attention's metadata from
what `take_drafts` has decided, and verdicts into the seats' state and the host's table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.kernel_set import KernelSet
from target_service.acceptance import SyntheticAcceptance
from target_service.device.buffers import StepMemory, StepShape
from target_service.device.forward import StepOutput


class StepFrame:
    """Enqueues it. Used by one thread. block_size: tokens of a block. table_width: columns of a seat's block table."""

    def __init__(
        self,
        kernels: KernelSet,
        memory: StepMemory,
        block_size: int,
        max_model_len: int,
        synthetic: SyntheticAcceptance | None,
    ) -> None:
        """synthetic: has the last word on how many drafts of a uniform step are accepted; None: the accept rule has."""
        self.block_size = block_size
        self.table_width = memory.tables.table.shape[1]
        self._kernels = kernels
        self._buffers = memory.buffers
        self._plans = memory.plans
        self._seat_tables = memory.tables.table[None]
        self._block_sizes = (block_size,)
        self._max_model_len = max_model_len
        self._synthetic = synthetic

    def uniform_step(self, shape: StepShape, greedy: bool, run: Callable[[], StepOutput]) -> Callable[[], StepOutput]:
        """What a graph captures of a uniform step. greedy: to the end, else to its logits. run: forward and logits."""
        buffers = self._buffers
        starts = buffers.uniform_starts(shape.num_rows, shape.query_stride)

        def step() -> StepOutput:
            prompts = buffers.uniform_prompts[: shape.num_rows]
            self.prepare(shape, starts, prompts, self._plans.rows["prompt_starts"], buffers.no_prompt)
            output = run()
            if not greedy or output.logits is None:
                return output
            self.commit_greedy(shape, output.logits)
            # What a graph returns it keeps: logits are too big to be kept for nothing.
            return replace(output, logits=None)

        return step

    def prepare(
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
            self._block_sizes,
            self._max_model_len,
            shape.out_query_start_loc,
            shape.out_seq_lens,
            shape.out_block_tables,
            shape.out_slots,
        )

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
