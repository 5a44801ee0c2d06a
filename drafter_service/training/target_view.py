"""What does training need from the target for a batch of texts, and which positions are drafted from?

One causal forward gives the captured layers and, where a next token is an answer's, the target's distribution over
the draft vocabulary. Nothing of it is stored: the forward costs less than the head's own unrolled passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.corpus import Batch, Ints
from drafter_service.training.dense_attention import causal_plans, dense_cache
from engine.decoder import Decoder
from engine.kv_cache import KVCache

_LOGIT_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ChainStarts:
    """Where a drafting can begin, as flat positions b * L + t.

    starts: [N] int64; valid: [N, S] bool, the token proposed in step s is of the same answer; it stands at start + 2
    + s. rows: [N, S] int64, which of the wanted target positions (`wanted` [M] flat) speaks about it; 0 where not
    valid.
    """

    starts: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """probs: [M, Vd], the target's distribution renormalised over the draft vocabulary; mass: [M] float32, its share
    of all.
    """

    probs: torch.Tensor
    mass: torch.Tensor


class TargetView:
    """The target, run over whole texts. One per training run; holds a token-sized cache that no plan here uses."""

    def __init__(self, decoder: Decoder, hidden_layers: tuple[int, ...]) -> None:
        self.decoder = decoder
        self.hidden_layers = hidden_layers
        self._cache: KVCache = dense_cache(decoder.config, 1, 1, decoder.dtype, decoder.device)

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids: [B, L]. Returns (hidden [B * L, H] after the final norm, captured [B * L, A * H])."""
        batch, length = token_ids.shape
        plans = causal_plans(self.decoder.config, batch, length, token_ids.device)
        positions = torch.arange(length, device=token_ids.device).repeat(batch)
        output = self.decoder.forward(token_ids.reshape(-1), positions, plans, self._cache, self.hidden_layers)
        assert output.captured is not None
        return output.hidden, output.captured

    @torch.no_grad()
    def soft_targets(self, hidden: torch.Tensor, draft_ids: torch.Tensor, dtype: torch.dtype) -> SoftTargets:
        """hidden: [M, H] after the final norm. draft_ids: [Vd] target ids. probs come as dtype."""
        probs, masses = [], []
        for rows in hidden.split(_LOGIT_ROWS):
            logits = self.decoder.logits(rows)
            draft_logits = logits[:, draft_ids]
            draft_total = draft_logits.logsumexp(-1)
            masses.append((draft_total - logits.logsumexp(-1)).exp())
            probs.append((draft_logits - draft_total[:, None]).exp().to(dtype))
        return SoftTargets(torch.cat(probs), torch.cat(masses))


def chain_starts(batch: Batch, num_steps: int, device: torch.device) -> ChainStarts:
    """The positions from which a service would draft: t such that tokens t + 1 (the anchor) and t + 2 are of one
    answer.
    """
    answers = batch.answers
    height, width = answers.shape
    padded = np.zeros((height, width + num_steps + 2), dtype=np.bool_)
    padded[:, :width] = answers
    proposed: list[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = []
    alive = padded[:, 1 : width + 1]
    for step in range(num_steps):
        alive = alive & padded[:, 2 + step : width + 2 + step]
        proposed.append(alive)
    rows_of = np.zeros((height, width + num_steps + 2), dtype=np.int64)
    speaks = padded[:, 1 : width + 1]  # position j speaks about token j + 1
    wanted = np.flatnonzero(speaks)
    rows_of[:, :width][speaks] = np.arange(wanted.size)
    starts = np.flatnonzero(proposed[0])
    row, column = starts // width, starts % width
    valid = np.stack([mask[row, column] for mask in proposed], axis=1)
    rows = np.stack([rows_of[row, column + 1 + step] for step in range(num_steps)], axis=1) * valid

    def put(array: Ints | np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return ChainStarts(put(starts), put(valid), put(rows), put(wanted))


def proposed_tokens(token_ids: torch.Tensor, starts: torch.Tensor, step: int) -> torch.Tensor:
    """The text's tokens that step `step` proposes from `starts` [N]; meaningless where the step is not valid. [N]."""
    flat = token_ids.reshape(-1)
    return flat[(starts + 2 + step).clamp(max=flat.numel() - 1)]


def drafted_tokens(head: Eagle3Head, logits: torch.Tensor) -> torch.Tensor:
    """Greedy drafts as target ids: [N]. logits: [N, Vd]."""
    return head.target_ids(logits.argmax(-1))
