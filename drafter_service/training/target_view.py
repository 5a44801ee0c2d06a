"""What does training need from the target for a batch of texts, and which positions are drafted from?

One causal forward gives the captured layers and, where a next token is an answer's, the target's distribution over
the draft vocabulary. Nothing of it is stored: the forward costs less than the head's own unrolled passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training import fused
from drafter_service.training.corpus import Batch, Ints
from drafter_service.training.dense_attention import causal_plans, dense_cache
from engine.decoder import Decoder
from engine.kv_cache import KVCache
from kernels.attention.interface import AttentionPlan

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
class ChainArrays:
    """The same on the host."""

    starts: Ints
    valid: npt.NDArray[np.bool_]
    rows: Ints
    wanted: Ints


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
        self._inv_freq = torch.tensor(decoder.config.inv_freq, dtype=torch.float32, device=decoder.device)

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids: [B, L]. Returns (hidden [B * L, H] after the final norm, captured [B * L, A * H])."""
        batch, length = token_ids.shape
        plans = causal_plans(self.decoder.config, batch, length, token_ids.device)
        positions = torch.arange(length, device=token_ids.device).repeat(batch)
        if token_ids.is_cuda and not self.decoder.config.qk_norm:
            return self._run_fused(token_ids.reshape(-1), positions, plans)
        output = self.decoder.forward(token_ids.reshape(-1), positions, plans, self._cache, self.hidden_layers)
        assert output.captured is not None
        return output.hidden, output.captured

    @torch.no_grad()
    def soft_targets(self, hidden: torch.Tensor, draft_ids: torch.Tensor, dtype: torch.dtype) -> SoftTargets:
        """hidden: [M, H] after the final norm. draft_ids: [Vd] target ids. probs come as dtype."""
        probs, masses = [], []
        for rows in hidden.split(_LOGIT_ROWS):
            logits = linear(rows, self.decoder.lm_head_weight) if rows.is_cuda else self.decoder.logits(rows)
            draft_logits = logits.index_select(1, draft_ids)
            draft_total = fused.logsumexp(draft_logits)
            masses.append((draft_total - fused.logsumexp(logits)).exp())
            probs.append((draft_logits.float() - draft_total[:, None]).exp().to(dtype))
        return SoftTargets(torch.cat(probs), torch.cat(masses))

    def _run_fused(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Sequence[AttentionPlan]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Decoder.forward` for the GPU, with training's own kernels between the products."""
        decoder, config = self.decoder, self.decoder.config
        groups = {layer: plan for group, plan in zip(decoder.groups, plans, strict=True) for layer in group.layers}
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = ((x * config.rope_scaling).to(decoder.dtype) for x in (angles.cos(), angles.sin()))
        residual = decoder.embed(token_ids)
        captured: dict[int, torch.Tensor] = {}
        layers, eps = decoder.layers, config.rms_eps
        normed = fused.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            qkv = layer.qkv(normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
            q, k, v = fused.rotate(qkv, config.num_heads, config.num_kv_heads, cos, sin)
            attended = groups[index].run(q, k, v, q, q)
            attended = layer.out(attended.reshape(attended.shape[0], -1))
            normed, residual = fused.rms_norm_residual(attended, residual, layer.post_norm, eps)
            mlp = layer.down(fused.silu_mul(layer.gate_up(normed)))
            following = layers[index + 1].input_norm if index + 1 < len(layers) else decoder.final_norm
            normed, residual = fused.rms_norm_residual(mlp, residual, following, eps)
            if index in self.hidden_layers:
                captured[index] = residual
        return normed, torch.cat([captured[index] for index in self.hidden_layers], dim=-1)


def chain_starts(batch: Batch, num_steps: int, device: torch.device) -> ChainStarts:
    """`chain_arrays` on a device."""
    arrays = chain_arrays(batch, num_steps)
    starts, valid, rows, wanted = (
        torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for array in (arrays.starts, arrays.valid, arrays.rows, arrays.wanted)
    )
    return ChainStarts(starts, valid, rows, wanted)


def chain_arrays(batch: Batch, num_steps: int) -> ChainArrays:
    """The positions from which a service would draft: t such that tokens t + 1 (the anchor) and t + 2 are of one
    answer.
    """
    answers = batch.answers
    height, width = answers.shape
    padded = np.zeros((height, width + num_steps + 2), dtype=np.bool_)
    padded[:, :width] = answers
    proposed: list[npt.NDArray[np.bool_]] = []
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

    return ChainArrays(starts, valid, rows, wanted)


def proposed_tokens(token_ids: torch.Tensor, starts: torch.Tensor, step: int) -> torch.Tensor:
    """The text's tokens that step `step` proposes from `starts` [N]; meaningless where the step is not valid. [N]."""
    flat = token_ids.reshape(-1)
    return flat[(starts + 2 + step).clamp(max=flat.numel() - 1)]


def drafted_tokens(head: Eagle3Head, logits: torch.Tensor) -> torch.Tensor:
    """Greedy drafts as target ids: [N]. logits: [N, Vd]."""
    return head.target_ids(logits.argmax(-1))
