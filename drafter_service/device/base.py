"""What do all methods of drafting on a device have in common? Buffers, sizes, graphs, and the choice of a draft."""

from __future__ import annotations

import torch

from drafter_service.device.counted_graphs import CountedGraphs
from drafter_service.device.metadata import Building, MetadataCounts
from drafter_service.device.plan_buffers import MISMATCHES, ReportLayout
from drafter_service.device.program import DeviceOptions
from drafter_service.device.seat_tables import SeatTables
from drafter_service.device.shapes import StepShape, tokens_per_row
from drafter_service.device.taken import make_taken
from drafter_service.residency import Resident
from drafter_service.settings import CacheSettings
from engine.channel.device import ReplyViews
from engine.graphs import GraphCounts
from engine.request_blocks import RequestBlocks
from kernels.kernel_set import KernelSet
from kernels.reference.argmax import make_scratch
from kernels.reference.philox import DRAFT
from kernels.reference.take_entry import TakenRows

# Of targets, by size: a method that has to know it captures every step for each. The graphs of more are made anew each
# time they come, the least recent ones first.
MAX_VOCABULARIES = 4


class ProgramBase:
    """The part of DrafterProgram that does not depend on the method.

    target_ids: [Vd] int64, the target's id of each draft id, or None where they are the same.
    """

    def __init__(
        self,
        settings: CacheSettings,
        device: torch.device,
        blocks: RequestBlocks | None,
        target_ids: torch.Tensor | None,
        kernels: KernelSet,
        options: DeviceOptions,
    ) -> None:
        self.device = device
        self.max_rows, self.max_tokens = settings.num_seats, settings.max_tokens
        self.max_draft_len = settings.max_draft_len
        self.counts = MetadataCounts()
        layout = ReportLayout(self.max_rows, self.max_tokens)
        self.report = torch.zeros(layout.num_words, dtype=torch.int64, device=device)
        self.taken = make_taken(self.report, layout, device)
        self.tables = SeatTables(blocks, self.max_rows, device)
        # By step, so that the tokens of one step lie side by side.
        self._tokens = torch.zeros((self.max_draft_len, self.max_rows), dtype=torch.int64, device=device)
        self.drafts = self._tokens.t()
        self._argmax_scratch = make_scratch(self.max_rows, device)
        self._settings = settings
        self._kernels = kernels
        self._options = options
        self._target_ids = target_ids
        self._row_tokens = tokens_per_row(self.max_draft_len)
        # Prefills with drafts behind them and without, and the draft steps of each length, by rows.
        num_graphs = len(options.graph_rows) * (2 * len(self._row_tokens) + self.max_draft_len - 1)
        self._graphs = CountedGraphs(device, MAX_VOCABULARIES * num_graphs, options.cuda_graphs, self.counts)
        # Tokens of the largest step that runs through a graph.
        self._graph_tokens = min(self.max_tokens, max(options.graph_rows, default=0) * self._row_tokens[-1])
        self._views: dict[tuple[int, int], TakenRows] = {}

    @property
    def graph_counts(self) -> GraphCounts:
        """See DrafterProgram.graph_counts."""
        return self._graphs.counts

    def draws(self, resident: Resident) -> bool:
        """See DrafterProgram.draws."""
        drawn = self._settings.draft_sampling == "probabilistic"
        return drawn and not resident.seeded and resident.temperature > 0

    def _building(self) -> Building:
        mismatches = self.report[MISMATCHES : MISMATCHES + 1] if self._options.shadow else None
        return Building(self.counts, self._options.fused, mismatches)

    def rows_of(self, shape: StepShape) -> TakenRows:
        """See DrafterProgram.rows_of."""
        size = (shape.padded_rows, shape.padded_tokens)
        return self._sized(*size) if shape.captured else self.taken.sized(*size)

    def _sized(self, num_rows: int, num_tokens: int) -> TakenRows:
        """Views of that size, kept: only for sizes of which there are few."""
        views = self._views.get((num_rows, num_tokens))
        if views is None:
            views = self._views[num_rows, num_tokens] = self.taken.sized(num_rows, num_tokens)
        return views

    def _choose(self, logits: torch.Tensor, step: int) -> None:
        """Draft `step` (from 0) of the first N rows, the best token. logits: [N, Vd] float32."""
        out = self._tokens[step, : logits.shape[0]]
        self._kernels.argmax(logits, self._target_ids, self._argmax_scratch, out)

    def _draw(self, logits: torch.Tensor, taken: TakenRows, step: int, num_rows: int, reply: ReplyViews) -> None:
        """Draft `step`, drawn where the row's temperature is above 0, and the distributions of the first num_rows."""
        positions = taken.anchor_positions + (step + 1)
        draft_ids = self._kernels.gumbel_sample(logits, taken.temperatures, taken.seeds, positions, DRAFT)
        out = self._tokens[step, : logits.shape[0]]
        if self._target_ids is None:
            out.copy_(draft_ids)
        else:
            torch.index_select(self._target_ids, 0, draft_ids, out=out)
        assert reply.probs is not None, "only drawn where the channel takes probabilities"
        temperatures = torch.where(taken.temperatures > 0, taken.temperatures, 1.0)
        probs = torch.softmax(logits / temperatures[:, None], dim=-1)[:num_rows]
        published = reply.probs[:num_rows, step]
        published.zero_()
        if self._target_ids is None:
            published[:, : probs.shape[1]] = probs
        else:
            published.index_copy_(1, self._target_ids, probs)
