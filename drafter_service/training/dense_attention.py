"""How does the target's decoder attend when training runs it, outside any service?

Attention plans for `Decoder.forward` that need no block pool. `DecodePlan`: sequence b owns block b of a cache whose
block is as long as the longest text, one new token each. `CausalPlan`: whole sequences side by side, nothing cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kv_cache import KVCache
from engine.kv_group import group_layers
from engine.model_config import ModelConfig
from kernels.attention.interface import AttentionPlan


class DecodePlan:
    """One new token for each of B sequences; token b has position positions[b] and is written before it attends.

    `positions` [B] int64 is read at every run and may be advanced in place between runs, inside a captured graph too.
    """

    def __init__(self, positions: torch.Tensor, scale: float, window: int | None) -> None:
        self._positions = positions
        self._rows = torch.arange(positions.numel(), device=positions.device)
        self._scale = scale
        self._window = window

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan; k_cache and v_cache are [B, S, Hkv, D]."""
        k_cache[self._rows, self._positions] = k.to(k_cache.dtype)
        v_cache[self._rows, self._positions] = v.to(v_cache.dtype)
        if q.is_cuda and q.shape[-1] & (q.shape[-1] - 1) == 0:
            from drafter_service.training.decode_kernel import decode_attention

            return decode_attention(q, k_cache, v_cache, self._positions + 1, self._scale, self._window)
        return masked_decode_attention(q, k_cache, v_cache, self._positions + 1, self._scale, self._window)


def masked_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lens: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """The same as `decode_kernel.decode_attention`, in plain torch over the whole cache."""
    longest = k_cache.shape[1] if q.is_cuda else int(lens.max())
    group = q.shape[1] // k_cache.shape[2]
    k = k_cache[:, :longest].transpose(1, 2).repeat_interleave(group, dim=1)
    v = v_cache[:, :longest].transpose(1, 2).repeat_interleave(group, dim=1)
    tokens = torch.arange(longest, device=q.device)
    seen = tokens < lens[:, None]
    if window is not None:
        seen &= tokens >= lens[:, None] - window
    return scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], scale=scale)[:, :, 0]


class CausalPlan:
    """B whole sequences of L tokens each, flattened to [B * L]; no cache is read or written."""

    def __init__(self, batch: int, length: int, scale: float, window: int | None, device: torch.device) -> None:
        self._batch, self._length, self._scale = batch, length, scale
        self._mask: torch.Tensor | None = None
        if window is not None and window < length:
            distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
            self._mask = (distance >= 0) & (distance < window)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan; the caches are ignored."""
        del k_cache, v_cache
        heads = [x.view(self._batch, self._length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in heads[1:])
        out = scaled_dot_product_attention(
            heads[0], key, value, attn_mask=self._mask, is_causal=self._mask is None, scale=self._scale
        )
        return out.transpose(1, 2).reshape(q.shape)


def attention_scale(config: ModelConfig) -> float:
    """The factor on query-key products."""
    return float(config.head_dim**-0.5)


def decode_plans(config: ModelConfig, positions: torch.Tensor) -> Sequence[AttentionPlan]:
    """One DecodePlan for each KV group of the target."""
    return [DecodePlan(positions, attention_scale(config), group.window) for group in group_layers(config)]


def causal_plans(config: ModelConfig, batch: int, length: int, device: torch.device) -> Sequence[AttentionPlan]:
    """One CausalPlan for each KV group of the target."""
    scale = attention_scale(config)
    return [CausalPlan(batch, length, scale, group.window, device) for group in group_layers(config)]


def dense_cache(config: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A cache in which block b holds all of sequence b."""
    return KVCache(batch, length, config.num_layers, config.num_kv_heads, config.head_dim, dtype, device)
