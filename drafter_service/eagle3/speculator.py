"""How does an EAGLE-3 head draft for a step?

Draft prefill: every token of the step's rows gets its draft KV from the target's true hidden states, the rejected ones
too (their slots lie past the committed length and are written again). The layer being the only one, that KV needs no
attention: attention runs for one token a row, the last valid one, from where the first draft is made. Then K - 1 draft
steps on the head's own output, whose KV is approximate until the next step's prefill rewrites it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.choosing import DraftChooser
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.placement import Placements, ResidentDraft
from drafter_service.entries import entry_on
from drafter_service.metadata import MetadataBuilder
from drafter_service.residency import Resident
from drafter_service.settings import CacheSettings
from drafter_service.speculator import ChannelNeeds, DraftBatch, DraftProposal, DraftRow, empty_proposal
from engine.channel.interface import ChannelSpec, RingEntry
from engine.errors import ChannelError
from engine.kv_cache import KVCache
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention
from kernels.layout import make_query_start_loc
from kernels.reference.kv_write import write_kv
from kernels.reference.prefill_inputs import prepare_prefill_inputs


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What the draft prefill leaves for the draft steps; rows in drafting order, last valid token of each.

    last_index: [R] int64 into the tokens of q, k, v, residual, positions and slots.
    """

    last_index: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class Eagle3Speculator:
    """Drafts with an EAGLE-3 head. Owns the head's KV cache, blocks and metadata buffers.

    head: with its token embedding attached. hidden_layers: the target's layers that it reads, as outputs.
    """

    method = "eagle3"

    def __init__(self, head: Eagle3Head, hidden_layers: Sequence[int], settings: CacheSettings) -> None:
        config = head.config
        self.head = head
        self.settings = settings
        self._hidden_layers = tuple(hidden_layers)
        self.device = head.norm.weight.device
        max_len = config.max_len if settings.max_len is None else min(settings.max_len, config.max_len)
        self.placements = Placements(settings, max_len, self.device)
        self.kv = KVCache(
            settings.num_blocks + 1,  # plus the null block
            settings.block_size,
            1,
            config.num_kv_heads,
            config.head_dim,
            head.norm.weight.dtype,
            self.device,
        )
        self.metadata = MetadataBuilder(
            settings.num_seats,
            settings.max_tokens,
            self.placements.max_blocks,
            settings.block_size,
            max_len,
            self.device,
        )
        self.attention = make_attention(
            settings.attention,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5,
            None,
            self.device,
        )
        all_ids = torch.arange(config.draft_vocab_size, device=self.device)
        identity = config.draft_vocab_size == config.vocab_size
        self.target_ids = None if identity else head.target_ids(all_ids)
        self._ids = torch.zeros(settings.max_tokens, dtype=torch.int64, device=self.device)
        self._last_index = torch.zeros(settings.num_seats, dtype=torch.int32, device=self.device)

    @property
    def needs(self) -> ChannelNeeds:
        """See Speculator.needs."""
        settings, config = self.settings, self.head.config
        return ChannelNeeds(
            hidden_layers=self._hidden_layers,
            hidden_width=len(self._hidden_layers) * config.target_hidden_size,
            max_draft_len=settings.max_draft_len,
            draft_probs=settings.draft_sampling == "probabilistic",
            metadata_source=settings.metadata_source,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=config.vocab_size,
            max_tokens=settings.max_tokens,
        )

    @property
    def num_free_blocks(self) -> int:
        """See Speculator.num_free_blocks."""
        return self.placements.num_free_blocks

    def check_channel(self, spec: ChannelSpec) -> None:
        """See Speculator.check_channel."""
        if spec.vocab_size != self.head.config.vocab_size:
            raise ChannelError(
                f"vocab_size: the EAGLE-3 head drafts for {self.head.config.vocab_size} tokens, the target has "
                f"{spec.vocab_size}"
            )
        if spec.hidden_width != self.needs.hidden_width:
            raise ChannelError(
                f"hidden_width: the EAGLE-3 head takes {self.needs.hidden_width}, the target gives {spec.hidden_width}"
            )
        if self.settings.metadata_source != "reuse":
            return
        if spec.block_size != self.settings.block_size:
            raise ChannelError(
                f"drafter.block_size: {self.settings.block_size}, but the target's is {spec.block_size}, and "
                "metadata_source `reuse` needs them equal"
            )
        if spec.num_blocks > self.kv.num_blocks:
            raise ChannelError(
                f"drafter.num_blocks: {self.settings.num_blocks}, but metadata_source `reuse` mirrors the target's "
                f"{spec.num_blocks - 1} blocks"
            )

    def admit(self, resident: Resident) -> int:
        """See Speculator.admit."""
        return self.placements.admit(resident)

    def release(self, resident: Resident) -> None:
        """See Speculator.release."""
        self.placements.release(resident)

    def check_integrity(self) -> None:
        """See Speculator.check_integrity."""
        self.placements.check_integrity()

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftProposal:
        """See Speculator.propose."""
        started = time.perf_counter()
        entry = entry_on(batch.entry, self.device)
        placed = [place for row in batch.rows if (place := self.placements.place(row, entry)) is not None]
        if not placed:
            return empty_proposal(entry.num_rows)
        placed.sort(key=lambda place: -place.draft_len)  # rows that stop early are then always the last ones
        builds, launches = self.metadata.builds, self.metadata.launches
        prefill = self._prefill(placed, entry)
        for place in placed:
            self.placements.commit(place)
        prefilled = time.perf_counter()
        draft_lens = [place.draft_len for place in placed if place.draft_len > 0]
        chooser = DraftChooser(
            [place.row for place in placed[: len(draft_lens)]],
            draft_lens,
            entry,
            batch.target_vocab,
            self.target_ids,
            batch.wants_probs and self.settings.draft_sampling == "probabilistic",
        )
        if draft_lens:
            self._draft(prefill, draft_lens, chooser)
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

    def _prefill(self, placed: Sequence[ResidentDraft], entry: RingEntry) -> _Prefill:
        """Write the draft KV of all tokens of the placed rows, from the target's hidden states."""
        head = self.head
        rows = [place.row for place in placed]
        starts_np = make_query_start_loc(np.array([row.query_len for row in rows]))
        num_tokens = int(starts_np[-1])
        token_index = _token_index(rows, entry.num_tokens, self.device)
        row_index = torch.tensor([row.index for row in rows], device=self.device)
        positions = _take(entry.positions, token_index)
        offsets = np.array([place.start for place in placed])
        if offsets.any():
            lens = np.array([row.query_len for row in rows])
            positions = positions - torch.from_numpy(np.repeat(offsets, lens)).to(self.device)
        seq_lens = np.array([place.row.context_len + place.row.query_len - place.start for place in placed])
        metadata = self._build(placed, entry, starts_np, seq_lens, positions, row_index, token_index)

        ids, last_index = self._ids[:num_tokens], self._last_index[: len(rows)]
        prepare_prefill_inputs(
            _take(entry.input_ids, token_index),
            metadata.query_start_loc,
            entry.num_rejected[row_index],
            entry.anchors[row_index],
            entry.next_prompt_tokens[row_index],
            ids,
            last_index,
        )
        assert entry.hidden is not None, "the channel was opened without hidden states"
        fused = head.fuse(_take(entry.hidden, token_index))
        q, k, v, residual = head.project(ids, fused, positions)
        write_kv(k, v, metadata.slot_mapping, self.kv.k(0), self.kv.v(0))
        return _Prefill(last_index.to(torch.int64), q, k, v, residual, positions, metadata.slot_mapping)

    def _build(
        self,
        placed: Sequence[ResidentDraft],
        entry: RingEntry,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        positions: torch.Tensor,
        row_index: torch.Tensor,
        token_index: torch.Tensor | None,
    ) -> AttentionMetadata:
        if self.settings.metadata_source == "reuse":
            slots = _take(entry.slot_mapping, token_index)
            return self.metadata.reuse(entry.block_tables[row_index], slots, starts, seq_lens)
        seats = np.array([place.row.resident.seat for place in placed])
        return self.metadata.build(self.placements.seat_tables(), seats, starts, seq_lens, positions)

    def _draft(self, prefill: _Prefill, draft_lens: Sequence[int], chooser: DraftChooser) -> None:
        """Draft for the first rows of the prefill; draft_lens descend and are all > 0."""
        head, metadata, attention = self.head, self.metadata, self.attention
        k_cache, v_cache = self.kv.k(0), self.kv.v(0)
        num_rows = len(draft_lens)
        last = prefill.last_index[:num_rows]
        metadata.begin_draft(prefill.positions[last], prefill.slots[last])
        plan = attention.plan(metadata.draft_step(num_rows))
        attended = plan.run(prefill.q[last], prefill.k[last], prefill.v[last], k_cache, v_cache)
        output = head.finish(attended, prefill.residual[last])
        tokens = chooser.choose(head.logits(output), 0)
        for step in range(1, draft_lens[0]):
            while draft_lens[num_rows - 1] <= step:
                num_rows -= 1
            metadata.advance(num_rows)
            plan = attention.plan(metadata.draft_step(num_rows))
            hidden = head.next_hidden(output[:num_rows])
            positions = metadata.step_positions[:num_rows]
            output = head(tokens[:num_rows], hidden, positions, plan, k_cache, v_cache)
            tokens = chooser.choose(head.logits(output), step)


def _take(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return values if index is None else values[index]


def _token_index(rows: Sequence[DraftRow], num_tokens: int, device: torch.device) -> torch.Tensor | None:
    """The entry's tokens of these rows, in this order; None where that is all of them as they are."""
    expected = 0
    for row in rows:
        if row.query_start != expected:
            break
        expected += row.query_len
    if expected == num_tokens:
        return None
    parts = [np.arange(row.query_start, row.query_start + row.query_len) for row in rows]
    return torch.from_numpy(np.concatenate(parts)).to(device)
