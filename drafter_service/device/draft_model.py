"""How does a small model of the same tokenizer draft for a step that the host has not seen yet?

Each step runs the target's accepted tokens once more, where they stand, and the anchor behind them; then draft steps
2..K in one graph. A request that joins late is caught up from its tokens, which the host knows, before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from drafter_service.device.base import ProgramBase
from drafter_service.device.marks import PREFILLED
from drafter_service.device.metadata import DeviceMetadata, GroupBlocks, MetadataSizes
from drafter_service.device.program import DeviceOptions
from drafter_service.device.shapes import StepShape, step_shape
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.residency import Resident
from engine.channel.device import ReplyViews
from engine.channel.interface import RingEntry
from engine.step_marks import StepMarks
from kernels.attention.interface import AttentionMetadata, AttentionPlan
from kernels.kernel_set import KernelSet
from kernels.layout import make_slot_mapping
from kernels.reference.take_entry import TakenLayout, TakenRows


class DraftModelProgram(ProgramBase):
    """See DrafterProgram. Shares the speculator's decoder, KV cache and blocks."""

    layout: TakenLayout | None = None

    def __init__(self, speculator: DraftModelSpeculator, kernels: KernelSet, options: DeviceOptions) -> None:
        settings, decoder = speculator.settings, speculator.decoder
        super().__init__(settings, decoder.device, speculator.blocks, None, kernels, options)
        # The anchor stands behind the row: `take_entry` is told of one position less.
        self.max_len = speculator.max_len - 1
        self._speculator = speculator
        self._decoder = decoder
        self._kv = speculator.kv
        device, most = decoder.device, self.max_tokens + self.max_rows
        self._metadata = DeviceMetadata(
            MetadataSizes(self.max_rows, most, self.max_draft_len),
            GroupBlocks(self.tables.device[None], (settings.block_size,), speculator.max_len),
            kernels,
            self._building(),
            None,
        )
        self._starts = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._last_index = torch.zeros(self.max_rows, dtype=torch.int32, device=device)

    def first_state(self, resident: Resident, context_len: int) -> tuple[int, int]:
        """See DrafterProgram.first_state: what `catch_up` will have brought it to."""
        return 0, max(self._speculator.computed_len(resident), min(context_len, len(resident.tokens)))

    def bound(self, resident: Resident, context_len: int, query_len: int, draft_len: int) -> int:
        """See DrafterProgram.bound."""
        return self._speculator.bound(resident, context_len + query_len + 1, draft_len) - 1

    def catch_up(self, fresh: Sequence[tuple[Resident, int]]) -> None:
        """See DrafterProgram.catch_up: run the tokens that are missing."""
        for resident, context_len in fresh:
            start, end = self._speculator.computed_len(resident), min(context_len, len(resident.tokens))
            for first in range(start, end, self.max_tokens):
                self._run_known(resident, first, min(first + self.max_tokens, end))
            self._speculator.followed(resident, max(start, end))

    def followed(self, resident: Resident, start: int, committed_len: int) -> None:
        """See DrafterProgram.followed."""
        self._speculator.followed(resident, committed_len)

    def not_followed(self, resident: Resident, length: int | None) -> None:
        """See DrafterProgram.not_followed."""
        self._speculator.not_followed(resident, length is not None and length > self.max_len)

    def shape(self, num_rows: int, max_tokens: int, max_query_len: int, draft_len: int, drawn: bool) -> StepShape:
        """See DrafterProgram.shape."""
        graphs = (self._options.graph_rows, self._row_tokens, self._graph_tokens)
        return step_shape(num_rows, max_tokens, max_query_len, draft_len, drawn, *graphs)

    def read_entry(self, shape: StepShape, entry: RingEntry) -> None:
        """See DrafterProgram.read_entry: a draft model reads tokens alone."""

    def follow(
        self, taken: TakenRows, shape: StepShape, reply: ReplyViews, num_target_tokens: int, marks: StepMarks
    ) -> None:
        """See DrafterProgram.follow."""
        rows, tokens, drafting = shape.padded_rows, shape.padded_tokens, shape.draft_len > 0
        prefill = partial(self._prefill, taken, shape.max_query_len, num_target_tokens, drafting)
        if shape.drawn:
            logits = prefill()
            marks.set(PREFILLED)
            for step in range(shape.draft_len):
                assert logits is not None, "drafts are wanted"
                if step > 0:
                    logits = self._step(taken, step, num_target_tokens)
                self._draw(logits, taken, step, shape.num_rows, reply)
            return
        if shape.captured:
            key = ("prefill", rows, tokens, num_target_tokens, drafting)
            self._graphs.run(key, partial(self._first, taken, shape.max_query_len, num_target_tokens, drafting))
        else:
            self._first(taken, shape.max_query_len, num_target_tokens, drafting)
        marks.set(PREFILLED)
        if shape.draft_len > 1:
            draft = partial(self._draft, taken, shape.draft_len, num_target_tokens)
            if rows in self._options.graph_rows:
                self._graphs.run(("draft", rows, shape.draft_len, num_target_tokens), draft)
            else:
                draft()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See DrafterProgram.warm_up. Every size that a step can be padded to; nothing in the buffers runs a row."""
        vocab = self._decoder.config.vocab_size
        for rows in self._options.graph_rows:
            for row_tokens in self._row_tokens:
                if rows * row_tokens <= self._graph_tokens:
                    taken = self._sized(rows, rows * row_tokens)
                    for drafting in (True, False):
                        first = partial(self._first, taken, row_tokens, vocab, drafting)
                        self._graphs.capture(("prefill", rows, rows * row_tokens, vocab, drafting), first)
            taken = self._sized(rows, rows)
            for draft_len in range(2, self.max_draft_len + 1):
                self._graphs.capture(("draft", rows, draft_len, vocab), partial(self._draft, taken, draft_len, vocab))

    # Parts of a step. Each may be captured: persistent buffers in, persistent buffers out.

    def _first(self, taken: TakenRows, max_query_len: int, num_target_tokens: int, drafting: bool) -> None:
        """The prefill and the first draft, greedy."""
        logits = self._prefill(taken, max_query_len, num_target_tokens, drafting)
        if logits is not None:
            self._choose(logits, 0)

    def _prefill(
        self, taken: TakenRows, max_query_len: int, num_target_tokens: int, drafting: bool
    ) -> torch.Tensor | None:
        """The KV of the rows' accepted tokens and anchors. With `drafting`, the logits behind the anchors [Rp, V]."""
        num_rows = taken.seats.shape[0]
        num_tokens = taken.positions.shape[0] + num_rows
        starts, seq_lens = self._starts[: num_rows + 1], self._seq_lens[:num_rows]
        ids, positions = self._ids[:num_tokens], self._positions[:num_tokens]
        last_index = self._last_index[:num_rows]
        self._kernels.append_anchors(taken, starts, seq_lens, ids, positions, last_index)
        self._metadata.build(replace(taken, query_start_loc=starts, seq_lens=seq_lens, positions=positions))
        plans = self._plans(self._metadata.prefill(num_rows, num_tokens, max_query_len + 1))
        output = self._decoder.forward(self._known(ids, num_target_tokens), positions, plans, self._kv)
        if not drafting:
            return None
        self._metadata.begin_draft(taken)
        return self._logits(output.hidden.index_select(0, last_index), num_target_tokens)

    def _draft(self, taken: TakenRows, draft_len: int, num_target_tokens: int) -> None:
        """Drafts 2 .. draft_len, greedy."""
        for step in range(1, draft_len):
            self._choose(self._step(taken, step, num_target_tokens), step)

    def _step(self, taken: TakenRows, step: int, num_target_tokens: int) -> torch.Tensor:
        """Run draft `step` - 1 of every row that goes on. Returns the logits behind it [Rp, V]."""
        self._metadata.advance(taken, step)
        tokens = self._tokens[step - 1, : taken.seats.shape[0]]
        plans = self._plans(self._metadata.draft_step(taken))
        output = self._decoder.forward(tokens, taken.step_positions, plans, self._kv)
        return self._logits(output.hidden, num_target_tokens)

    def _run_known(self, resident: Resident, start: int, end: int) -> None:
        """Run tokens [start, end) of a resident, all of whose numbers the host has."""
        speculator, count = self._speculator, end - start
        table = speculator.blocks.table_np[resident.seat][None].copy()
        positions = np.arange(start, end)
        starts = np.array([0, count], dtype=np.int32)
        slots = make_slot_mapping(table, positions, starts, self._settings.block_size, speculator.max_len, count)
        seq_lens = np.array([end], dtype=np.int32)
        metadata = AttentionMetadata(
            query_start_loc=self._sent(starts),
            seq_lens=self._sent(seq_lens),
            block_tables=self._sent(table),
            slot_mapping=self._sent(slots),
            max_query_len=count,
            max_seq_len=end,
            query_start_loc_np=starts,
            seq_lens_np=seq_lens,
        )
        ids = self._sent(np.array(resident.tokens[start:end]))
        vocab = self._decoder.config.vocab_size
        self._decoder.forward(ids.clamp(max=vocab - 1), self._sent(positions), self._plans(metadata), self._kv)

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        """On the device, in order with what is enqueued, without waiting for it."""
        host = torch.from_numpy(values)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def _plans(self, metadata: AttentionMetadata) -> list[AttentionPlan]:
        return [attention.plan(metadata) for attention in self._speculator.attentions]

    def _known(self, ids: torch.Tensor, num_target_tokens: int) -> torch.Tensor:
        """Ids that the draft model has: others read as its last one, and draft badly."""
        vocab = self._decoder.config.vocab_size
        return ids if num_target_tokens <= vocab else ids.clamp(max=vocab - 1)

    def _logits(self, hidden: torch.Tensor, num_target_tokens: int) -> torch.Tensor:
        """Without the ids that the target does not have (some models pad their vocabulary)."""
        return self._decoder.logits(hidden)[:, :num_target_tokens]
