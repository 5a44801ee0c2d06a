"""Which token does a draft step propose, and with what probability was it drawn?

Greedy by default: the best token, no probabilities (the target then treats the draft as one-hot). `probabilistic` draws
unseeded rows with a temperature from the draft's own distribution and publishes it. Its noise is of the stream DRAFT,
which verification never uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_service.speculator import DraftRow
from engine.channel.interface import RingEntry
from kernels.reference.philox import DRAFT
from kernels.reference.sampling import gumbel_sample


class DraftChooser:
    """The drafts of one proposal. The rows are in drafting order: those that draft longest come first.

    num_rows: of the entry. target_ids: [Vd] int64, the target's id of each draft id, ascending, or None where they are
    the same. probabilistic: draw (and publish probabilities) where a row's sampling allows it.
    """

    def __init__(
        self,
        rows: Sequence[DraftRow],
        draft_lens: Sequence[int],
        entry: RingEntry,
        vocab_size: int,
        target_ids: torch.Tensor | None,
        probabilistic: bool,
    ) -> None:
        max_len = max(draft_lens, default=0)
        device = entry.anchors.device
        self._index = torch.tensor([row.index for row in rows], dtype=torch.int64, device=device)
        self._target_ids = target_ids
        self.tokens = torch.full((entry.num_rows, max_len), -1, dtype=torch.int64, device=device)
        self.probs: torch.Tensor | None = None
        self.has_probs: torch.Tensor | None = None
        self._temperatures: torch.Tensor | None = None
        if not probabilistic:
            return
        unseeded = torch.tensor([not row.resident.seeded for row in rows], device=device)
        temperatures = torch.where(unseeded, entry.temperatures[self._index], 0.0)
        if bool((temperatures > 0).any()):
            self._temperatures = temperatures
            self._seeds = entry.seeds[self._index]
            anchor_positions = [row.committed_len for row in rows]
            self._anchor_positions = torch.tensor(anchor_positions, dtype=torch.int64, device=device)
            self.probs = torch.zeros((entry.num_rows, max_len, vocab_size), dtype=torch.float32, device=device)
            self.has_probs = torch.zeros(entry.num_rows, dtype=torch.bool, device=device)
            self.has_probs[self._index] = temperatures > 0

    def choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Take draft `step` (from 0) of the first N rows. logits: [N, Vd] float32. Returns target ids [N] int64."""
        num_rows = logits.shape[0]
        index = self._index[:num_rows]
        if self._temperatures is None or self.probs is None:
            draft_ids = logits.argmax(dim=-1)
        else:
            temperatures = self._temperatures[:num_rows]
            positions = self._anchor_positions[:num_rows] + step + 1
            draft_ids = gumbel_sample(logits, temperatures, self._seeds[:num_rows], positions, DRAFT)
            scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
            probs = torch.softmax(scaled, dim=-1)
            if self._target_ids is None:
                self.probs[index, step, : probs.shape[1]] = probs
            else:
                self.probs[index[:, None], step, self._target_ids[None, :]] = probs
        ids = draft_ids if self._target_ids is None else self._target_ids[draft_ids]
        self.tokens[index, step] = ids
        return ids
