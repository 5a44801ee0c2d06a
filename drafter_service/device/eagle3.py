"""How does an EAGLE-3 head draft for a step that the host has not seen yet?

Draft prefill: the KV of every token of the step's rows from the target's true hidden states, then attention for one
token a row, the last valid one, and the first draft. Then draft steps 2..K on the head's own output, in one graph, its
metadata advanced in place. What passes from one graph to the next lies in buffers that are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from drafter_service.device.base import ProgramBase
from drafter_service.device.head import HeadOutput, HeadRunner
from drafter_service.device.marks import PREFILLED
from drafter_service.device.metadata import DeviceMetadata, GroupBlocks, MetadataSizes
from drafter_service.device.program import DeviceOptions
from drafter_service.device.shapes import StepShape, step_shape
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.residency import Resident
from engine.channel.device import ReplyViews
from engine.channel.interface import RingEntry
from engine.cuda.copying import DeviceCopies
from engine.step_marks import StepMarks
from kernels.attention.interface import RotatingPlan
from kernels.kernel_set import KernelSet
from kernels.layout import PAD_SLOT
from kernels.reference.take_entry import TakenLayout, TakenRows


class Eagle3Program(ProgramBase):
    """See DrafterProgram. Shares the speculator's head, KV cache and blocks."""

    def __init__(self, speculator: Eagle3Speculator, kernels: KernelSet, options: DeviceOptions) -> None:
        settings, config, device = speculator.settings, speculator.head.config, speculator.device
        placements = speculator.placements
        super().__init__(settings, device, placements.blocks, speculator.target_ids, kernels, options)
        self.max_len = placements.max_len
        self._placements = placements
        self._kv = speculator.kv
        self._head = HeadRunner(speculator.head, kernels)
        self._attention = speculator.attention
        self._plans: dict[int, RotatingPlan] = {}
        self.layout: TakenLayout | None = None
        if settings.metadata_source == "reuse":
            self.layout = TakenLayout(
                torch.full((self.max_tokens,), PAD_SLOT, dtype=torch.int64, device=device),
                torch.zeros((self.max_rows, placements.max_blocks), dtype=torch.int32, device=device),
                self._kv.num_blocks,
                settings.block_size,
            )
        self._metadata = DeviceMetadata(
            MetadataSizes(self.max_rows, self.max_tokens, self.max_draft_len),
            GroupBlocks(self.tables.device[None], (settings.block_size,), self.max_len),
            kernels,
            self._building(),
            self.layout,
        )
        dtype = self._head.dtype
        width = config.num_captured * config.target_hidden_size
        self._copies = DeviceCopies(device)
        self._hidden = torch.zeros((self._graph_tokens, width), dtype=dtype, device=device)
        self._ids = torch.zeros(self.max_tokens, dtype=torch.int64, device=device)
        self._last_index = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        self._carry = torch.zeros((self.max_rows, config.hidden_size), dtype=dtype, device=device)
        self._fused: torch.Tensor | None = None

    def first_state(self, resident: Resident, context_len: int) -> tuple[int, int]:
        """See DrafterProgram.first_state."""
        return self._placements.first_state(resident)

    def bound(self, resident: Resident, context_len: int, query_len: int, draft_len: int) -> int:
        """See DrafterProgram.bound."""
        return self._placements.bound(resident, context_len, query_len, draft_len)

    def catch_up(self, fresh: Sequence[tuple[Resident, int]]) -> None:
        """See DrafterProgram.catch_up: a late request starts at its first row."""

    def shape(self, num_rows: int, max_tokens: int, max_query_len: int, draft_len: int, drawn: bool) -> StepShape:
        """See DrafterProgram.shape: what a row has of the tokens does not matter."""
        graphs = (self._options.graph_rows, self._row_tokens, self._graph_tokens)
        return step_shape(num_rows, max_tokens, 0, draft_len, drawn, *graphs)

    def followed(self, resident: Resident, start: int, committed_len: int) -> None:
        """See DrafterProgram.followed."""
        self._placements.followed(resident, start, committed_len)

    def not_followed(self, resident: Resident, length: int | None) -> None:
        """See DrafterProgram.not_followed."""
        self._placements.not_followed(resident, length is not None and not self._placements.usable(length))

    def read_entry(self, shape: StepShape, entry: RingEntry) -> None:
        """See DrafterProgram.read_entry: the hidden states, to where a graph finds them, or fused right away."""
        assert entry.hidden is not None, "the channel was opened without hidden states"
        count = shape.max_tokens
        self._fused = None
        if not shape.captured:
            self._fused = self._head.fuse(entry.hidden[:count])
        elif entry.hidden.dtype == self._hidden.dtype:
            self._copies.copy(self._hidden, entry.hidden, count * self._hidden.shape[1])
        else:
            self._hidden[:count].copy_(entry.hidden[:count])

    def follow(
        self, taken: TakenRows, shape: StepShape, reply: ReplyViews, num_target_tokens: int, marks: StepMarks
    ) -> None:
        """See DrafterProgram.follow."""
        rows, tokens, drafting = shape.padded_rows, shape.padded_tokens, shape.draft_len > 0
        if shape.drawn:
            output = self._prefill(taken, drafting)
            self._fused = None
            marks.set(PREFILLED)
            if output is not None:
                self._drawn_steps(taken, output, shape, reply)
            return
        if shape.captured:
            self._graphs.run(("prefill", rows, tokens, drafting), partial(self._captured_prefill, taken, drafting))
        else:
            output = self._prefill(taken, drafting)
            if output is not None:
                self._keep_first(output, rows)
        self._fused = None
        marks.set(PREFILLED)
        if shape.draft_len > 1:
            key = ("draft", rows, shape.draft_len)
            if rows in self._options.graph_rows:
                self._graphs.run(key, partial(self._draft, taken, shape.draft_len))
            else:
                self._draft(taken, shape.draft_len)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See DrafterProgram.warm_up. Every size that a step can be padded to; nothing in the buffers runs a row."""
        for rows in self._options.graph_rows:
            for row_tokens in self._row_tokens:
                if rows * row_tokens <= self._graph_tokens:
                    taken = self._sized(rows, rows * row_tokens)
                    for drafting in (True, False):
                        prefill = partial(self._captured_prefill, taken, drafting)
                        self._graphs.capture(("prefill", rows, rows * row_tokens, drafting), prefill)
            taken = self._sized(rows, rows)
            for draft_len in range(2, self.max_draft_len + 1):
                self._graphs.capture(("draft", rows, draft_len), partial(self._draft, taken, draft_len))

    # Parts of a step. Each may be captured: persistent buffers in, persistent buffers out.

    def _captured_prefill(self, taken: TakenRows, drafting: bool) -> None:
        output = self._prefill(taken, drafting)
        if output is not None:
            self._keep_first(output, taken.seats.shape[0])

    def _prefill(self, taken: TakenRows, drafting: bool) -> HeadOutput | None:
        """The draft KV of all tokens; with `drafting`, what the first draft is made from."""
        num_tokens, num_rows = taken.positions.shape[0], taken.seats.shape[0]
        self._metadata.build(taken)
        ids, last_index = self._ids[:num_tokens], self._last_index[:num_rows]
        self._kernels.prepare_prefill_inputs(
            taken.input_ids,
            taken.query_start_loc,
            taken.num_rejected,
            taken.anchors,
            taken.next_prompt_tokens,
            ids,
            last_index,
        )
        fused = self._head.fuse(self._hidden[:num_tokens]) if self._fused is None else self._fused
        k_cache, v_cache = self._kv.k(0), self._kv.v(0)
        slots = self._metadata.slots(num_tokens)
        q, residual = self._head.write_kv(ids, fused, taken.positions, slots, k_cache, v_cache)
        if not drafting:
            return None
        self._metadata.begin_draft(taken)
        index = last_index.clamp(min=0)
        attended = self._plan(taken).attend(q.index_select(0, index), k_cache, v_cache)
        return self._head.finish(attended, residual.index_select(0, index))

    def _keep_first(self, output: HeadOutput, num_rows: int) -> None:
        """The first draft, greedy, and what the draft steps begin with."""
        self._choose(self._head.logits(output), 0)
        self._carry[:num_rows].copy_(output.hidden)

    def _draft(self, taken: TakenRows, draft_len: int) -> None:
        """Drafts 2 .. draft_len, greedy."""
        hidden = self._carry[: taken.seats.shape[0]]
        for step in range(1, draft_len):
            output = self._step(taken, hidden, step)
            self._choose(self._head.logits(output), step)
            hidden = output.hidden

    def _step(self, taken: TakenRows, hidden: torch.Tensor, step: int) -> HeadOutput:
        """Run draft `step` - 1 of every row that goes on."""
        self._metadata.advance(taken, step)
        tokens = self._tokens[step - 1, : taken.seats.shape[0]]
        plan = self._plan(taken)
        return self._head.step(tokens, hidden, taken.step_positions, plan, self._kv.k(0), self._kv.v(0))

    def _drawn_steps(self, taken: TakenRows, output: HeadOutput, shape: StepShape, reply: ReplyViews) -> None:
        """All drafts, drawn where the row's temperature is above 0, and the distributions they were drawn from."""
        self._draw(self._head.logits(output), taken, 0, shape.num_rows, reply)
        for step in range(1, shape.draft_len):
            output = self._step(taken, output.hidden, step)
            self._draw(self._head.logits(output), taken, step, shape.num_rows, reply)

    def _plan(self, taken: TakenRows) -> RotatingPlan:
        """The draft steps' attention for that many rows: a view of buffers, made once."""
        num_rows = taken.seats.shape[0]
        plan = self._plans.get(num_rows)
        if plan is None:
            made = self._attention.plan(self._metadata.draft_step(self._sized(num_rows, 0)))
            assert isinstance(made, RotatingPlan), "backends without host lengths take unrotated queries"
            plan = self._plans[num_rows] = made
        return plan
