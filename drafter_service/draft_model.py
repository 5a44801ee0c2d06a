"""How does a small model of the same tokenizer draft for a step?

It follows the committed tokens alone: each step runs the tokens whose KV is missing, up to the anchor, then one draft
step per further draft. KV that a draft step wrote for a token that was accepted is right as it is and stays. A request
met late catches up from its tokens, a bounded number a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from drafter_service.choosing import DraftChooser
from drafter_service.entries import entry_on
from drafter_service.metadata import MetadataBuilder
from drafter_service.residency import Resident, Warmth
from drafter_service.settings import CacheSettings
from drafter_service.speculator import ChannelNeeds, DraftBatch, DraftProposal, DraftRow, empty_proposal
from engine.block_pool import BlockPool
from engine.channel.interface import ChannelSpec
from engine.decoder import Decoder
from engine.errors import CapacityError, ChannelError, ConfigError
from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionMetadata, AttentionPlan
from kernels.attention.registry import make_attention
from kernels.layout import make_positions, make_query_start_loc


@dataclass(slots=True)
class _SeatState:
    """computed: leading committed tokens whose KV is here. drafted: tokens whose KV follows, perhaps to be accepted."""

    computed: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens [start, end) of a row to run, and how many drafts to make after them (0 unless they end at the anchor)."""

    row: DraftRow
    start: int
    end: int
    draft_len: int


class DraftModelSpeculator:
    """Drafts with a small decoder. Owns its KV cache, blocks and metadata buffers."""

    method = "draft_model"

    def __init__(self, decoder: Decoder, settings: CacheSettings) -> None:
        if settings.metadata_source == "reuse":
            raise ConfigError(
                "drafter.metadata_source", "`reuse` needs method eagle3: a draft model's rows are not the target's"
            )
        config = decoder.config
        self.decoder = decoder
        self.settings = settings
        self.max_len = config.max_model_len if settings.max_len is None else min(settings.max_len, config.max_model_len)
        pool = BlockPool(settings.num_blocks + 1, settings.block_size, settings.prefix_caching, shift=0)
        self.blocks = RequestBlocks(pool, settings.num_seats, self.max_len, decoder.device)
        self.kv = decoder.make_kv_cache(settings.num_blocks + 1, settings.block_size)
        self.metadata = MetadataBuilder(
            settings.num_seats,
            settings.max_tokens,
            self.blocks.max_blocks,
            settings.block_size,
            self.max_len,
            decoder.device,
        )
        # All groups see the same blocks, so one builder serves them; they differ in their window alone.
        self.attentions = [
            make_attention(
                settings.attention,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.attention_scale,
                group.window,
                decoder.device,
            )
            for group in decoder.groups
        ]
        self._seats: dict[int, _SeatState] = {}

    @property
    def needs(self) -> ChannelNeeds:
        """See Speculator.needs."""
        settings = self.settings
        return ChannelNeeds(
            max_draft_len=settings.max_draft_len,
            draft_probs=settings.draft_sampling == "probabilistic",
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            max_tokens=settings.max_tokens,
        )

    @property
    def num_free_blocks(self) -> int:
        """See Speculator.num_free_blocks."""
        return self.blocks.pool.num_free

    def check_channel(self, spec: ChannelSpec) -> None:
        """See Speculator.check_channel."""
        if self.settings.max_tokens < spec.max_rows:
            raise ChannelError(
                f"drafter.max_step_tokens: {self.settings.max_tokens} is less than the {spec.max_rows} rows of a step"
            )

    def admit(self, resident: Resident) -> int:
        """See Speculator.admit."""
        state = _SeatState()
        if len(resident.tokens) > self.max_len:
            resident.warmth = Warmth.OFF
            self._seats[resident.seat] = state
            return len(resident.tokens) - 1  # it takes nothing from the target's hit
        state.computed = self.blocks.adopt(resident.seat, resident.tokens)
        if not self.blocks.reserve(resident.seat, len(resident.tokens)):
            self.blocks.release(resident.seat)
            raise CapacityError(f"{len(resident.tokens)} tokens do not fit into the free draft blocks")
        self._seats[resident.seat] = state
        return state.computed

    def release(self, resident: Resident) -> None:
        """See Speculator.release."""
        if self._seats.pop(resident.seat, None) is not None:
            self.blocks.release(resident.seat)

    def computed_len(self, resident: Resident) -> int:
        """Leading committed tokens of a resident request whose KV is here."""
        return self._seats[resident.seat].computed

    def check_integrity(self) -> None:
        """See Speculator.check_integrity."""
        self.blocks.check_integrity()

    # Where the device runs ahead of the host: bounds before a step, the truth after it.

    def bound(self, resident: Resident, length: int, draft_len: int) -> int:
        """Make room for at most so many tokens, and for drafts behind them. Returns the positions the request may use;
        0: it does not run.
        """
        if resident.warmth is not Warmth.WARM:
            return 0
        if not self._reserve(resident, min(length, self.max_len), draft_len):
            self._stop(resident, Warmth.COLD)
            return 0
        return min(self.blocks.capacity(resident.seat), self.max_len)

    def followed(self, resident: Resident, computed_len: int) -> None:
        """So many leading tokens of the resident have their KV now."""
        self._seats[resident.seat].computed = computed_len
        if resident.warmth is Warmth.WARM:
            self.blocks.register_written(resident.seat, resident.tokens, computed_len)

    def not_followed(self, resident: Resident, too_long: bool) -> None:
        """A step could not run a row of the resident: there was a hole, or no room for it."""
        self._stop(resident, Warmth.OFF if too_long else Warmth.COLD)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftProposal:
        """See Speculator.propose."""
        started = time.perf_counter()
        entry = entry_on(batch.entry, self.decoder.device)
        runs = self._plan_runs(batch.rows)
        if not runs:
            return empty_proposal(entry.num_rows)
        runs.sort(key=lambda run: -run.draft_len)  # rows that stop early are then always the last ones
        draft_lens = [run.draft_len for run in runs if run.draft_len > 0]
        builds, launches = self.metadata.builds, self.metadata.launches
        logits, last_positions, last_slots = self._prefill(runs, len(draft_lens), batch.target_vocab)
        for run in runs:
            state, resident = self._seats[run.row.resident.seat], run.row.resident
            state.computed, state.drafted = run.end, []
            self.blocks.register_written(resident.seat, resident.tokens, run.end)
        prefilled = time.perf_counter()
        drafting = [run.row for run in runs[: len(draft_lens)]]
        chooser = DraftChooser(
            drafting,
            draft_lens,
            entry,
            batch.target_vocab,
            None,
            batch.wants_probs and self.settings.draft_sampling == "probabilistic",
        )
        if logits is not None:
            self.metadata.begin_draft(last_positions, last_slots)
            self._draft(logits, drafting, draft_lens, chooser, batch.target_vocab)
        return DraftProposal(
            tokens=chooser.tokens,
            probs=chooser.probs,
            has_probs=chooser.has_probs,
            num_drafted=sum(draft_lens),
            metadata_builds=self.metadata.builds - builds,
            metadata_launches=self.metadata.launches - launches,
            prefill_ms=(prefilled - started) * 1e3,
            draft_ms=(time.perf_counter() - prefilled) * 1e3,
        )

    def _plan_runs(self, rows: Sequence[DraftRow]) -> list[_Run]:
        """What to run of each row, within max_tokens. Rows that need little go first, so that one catching up cannot
        hold up the others.
        """
        runs: list[_Run] = []
        left = self.settings.max_tokens
        pending = [(row, self._missing(row)) for row in rows if row.resident.warmth is Warmth.WARM]
        for row, (start, end) in sorted(pending, key=lambda item: item[1][1] - item[1][0]):
            resident, count = row.resident, min(end - start, left)
            if count <= 0 or resident.warmth is not Warmth.WARM:
                continue
            unknown = max(resident.tokens[start : start + count]) >= self.decoder.config.vocab_size
            if start + count > self.max_len or unknown:
                self._stop(resident, Warmth.OFF)
                continue
            complete = start + count == end
            wanted = row.draft_len if complete and row.anchor >= 0 else 0
            if not self._reserve(resident, start + count, wanted):
                self._stop(resident, Warmth.COLD)
                continue
            # The last draft's own KV is never written: k drafts take k - 1 positions past the anchor's.
            room = min(self.blocks.capacity(resident.seat), self.max_len) - (start + count)
            left -= count
            runs.append(_Run(row, start, start + count, min(wanted, room + 1)))
        return runs

    def _missing(self, row: DraftRow) -> tuple[int, int]:
        """Committed tokens [start, end) without KV, once the drafts that were accepted are counted in."""
        resident = row.resident
        state = self._seats[resident.seat]
        # Mid-prompt the tokens are all known, but are run only as far as the target has run them.
        end = row.committed_len + 1 if row.anchor >= 0 else min(row.committed_len, len(resident.tokens))
        if len(resident.tokens) < end:
            self._stop(resident, Warmth.COLD)
            return 0, 0
        for token in state.drafted:
            if state.computed >= end or resident.tokens[state.computed] != token:
                break
            state.computed += 1
        state.drafted = []
        # The anchor always runs: its output is what the first draft is made from.
        return min(state.computed, end - 1) if row.anchor >= 0 else state.computed, end

    def _reserve(self, resident: Resident, length: int, draft_len: int) -> bool:
        wanted = min(length + max(draft_len - 1, 0), self.max_len)
        return self.blocks.reserve(resident.seat, wanted) or self.blocks.reserve(resident.seat, length)

    def _prefill(
        self, runs: Sequence[_Run], num_drafting: int, target_vocab: int
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Run the tokens. Returns logits [num_drafting, V] of the first rows' last tokens, their positions, slots."""
        device = self.decoder.device
        starts = np.array([run.start for run in runs])
        ends = np.array([run.end for run in runs])
        query_start_loc = make_query_start_loc(ends - starts)
        positions = torch.from_numpy(make_positions(starts, ends - starts)).to(device)
        ids = [token for run in runs for token in run.row.resident.tokens[run.start : run.end]]
        seats = np.array([run.row.resident.seat for run in runs])
        metadata = self.metadata.build(self.blocks.sync(), seats, query_start_loc, ends, positions)
        token_ids = torch.tensor(ids, dtype=torch.int64, device=device)
        output = self.decoder.forward(token_ids, positions, self._plans(metadata), self.kv)
        last = torch.from_numpy(query_start_loc[1 : num_drafting + 1].astype(np.int64) - 1).to(device)
        logits = self._logits(output.hidden[last], target_vocab) if num_drafting else None
        return logits, positions[last], metadata.slot_mapping[last]

    def _draft(
        self,
        logits: torch.Tensor,
        rows: Sequence[DraftRow],
        draft_lens: Sequence[int],
        chooser: DraftChooser,
        target_vocab: int,
    ) -> None:
        """Draft for `rows`; draft_lens descend and are all > 0."""
        num_rows = len(draft_lens)
        tokens = chooser.choose(logits, 0)
        for step in range(1, draft_lens[0]):
            while draft_lens[num_rows - 1] <= step:
                num_rows -= 1
            self.metadata.advance(num_rows)
            plans = self._plans(self.metadata.draft_step(num_rows))
            positions = self.metadata.step_positions[:num_rows]
            output = self.decoder.forward(tokens[:num_rows], positions, plans, self.kv)
            tokens = chooser.choose(self._logits(output.hidden, target_vocab), step)
        drafts = chooser.tokens.tolist()
        for row, draft_len in zip(rows, draft_lens, strict=True):
            self._seats[row.resident.seat].drafted = drafts[row.index][: draft_len - 1]

    def _plans(self, metadata: AttentionMetadata) -> list[AttentionPlan]:
        return [attention.plan(metadata) for attention in self.attentions]

    def _logits(self, hidden: torch.Tensor, target_vocab: int) -> torch.Tensor:
        """Without the ids that the target does not have (some models pad their vocabulary)."""
        return self.decoder.logits(hidden)[:, :target_vocab]

    def _stop(self, resident: Resident, warmth: Warmth) -> None:
        resident.warmth = warmth
        self.blocks.release(resident.seat)
