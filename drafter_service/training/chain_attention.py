"""How does a draft step attend to a whole text without writing down [L, L] weights?

The step-0 keys go through flash attention, which also gives the log-sum-exp of its scores; the few keys of a position's
own chain are added by hand, and the two parts are merged by their log-sum-exps, as ring attention merges its blocks
(Liu et al. 2023). The backward pass gives flash attention's backward the merged output and log-sum-exp, so that the
weights it recomputes are those of the whole softmax.
"""

from __future__ import annotations

from typing import Any

import torch

_AT = torch.ops.aten
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def has_flash(query: torch.Tensor) -> bool:
    """Whether `chained_attention` has a kernel for this on a GPU; elsewhere it is right but of no use."""
    return query.is_cuda and query.dtype in _FLASH_DTYPES


def chained_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """Position t attends to keys 0..t of `key` and to position t of every chain key.

    query: [B, Hq, L, D]; key, value and those in chain (one or more pairs): [B, Hkv, L, D]. Returns [B, Hq, L, D].
    """
    flat = [tensor for pair in chain for tensor in pair]
    merged: torch.Tensor = _ChainedAttention.apply(scale, query, key, value, *flat)  # type: ignore[no-untyped-call]
    return merged


class _ChainedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *chain: torch.Tensor
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        wide_key, wide_value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        first, first_lse, random_state = _flash(query, wide_key, wide_value, scale)
        grouped = _grouped(query, group).float()
        scores = [(grouped * k[:, :, None]).sum(-1) * scale for k in chain[::2]]
        own = torch.stack(scores, -1).flatten(1, 2)
        lse = torch.logaddexp(first_lse, own.logsumexp(-1))
        weights = (own - lse[..., None]).exp()
        merged = first.float() * (first_lse - lse).exp()[..., None]
        for index, v in enumerate(chain[1::2]):
            share = _grouped(weights[..., index], group)
            merged += (share[..., None] * v[:, :, None]).flatten(1, 2)
        merged = merged.to(query.dtype)
        ctx.scale, ctx.group, ctx.random_state = scale, group, random_state
        ctx.save_for_backward(query, wide_key, wide_value, merged, lse, weights, *chain)
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        query, wide_key, wide_value, merged, lse, weights, *chain = ctx.saved_tensors
        scale, group, dtype = ctx.scale, ctx.group, query.dtype
        gradient = gradient.contiguous()
        d_query, d_key, d_value = _flash_backward(
            gradient, query, wide_key, wide_value, merged, lse, scale, ctx.random_state
        )
        delta = (gradient.float() * merged).sum(-1)
        d_query = d_query.float()
        wide_query, wide_gradient = _grouped(query, group).float(), _grouped(gradient, group).float()
        d_chain: list[torch.Tensor] = []
        for index in range(len(chain) // 2):
            k, v = chain[2 * index], chain[2 * index + 1]
            weight = _grouped(weights[..., index], group)
            d_weight = (wide_gradient * v[:, :, None]).sum(-1)
            d_score = (weight * (d_weight - _grouped(delta, group)) * scale)[..., None]
            d_query += (d_score * k[:, :, None]).flatten(1, 2)
            d_chain += [(d_score * wide_query).sum(2).to(dtype), (weight[..., None] * wide_gradient).sum(2).to(dtype)]
        d_key, d_value = (_grouped(x, group).sum(2).to(dtype) for x in (d_key, d_value))
        return None, d_query.to(dtype), d_key, d_value, *d_chain


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[B, Hkv * group, ...] as [B, Hkv, group, ...]."""
    grouped: torch.Tensor = x.unflatten(1, (-1, group))
    return grouped


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(causal attention [B, H, L, D], log-sum-exp [B, H, L] float32, what the backward pass wants back)."""
    if query.is_cuda:
        found = _AT._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)
        return found[0], found[1], (found[6], found[7])
    out, lse = _AT._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
    return out, lse, ()


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    random_state: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query.is_cuda:
        length = query.shape[2]
        dq, dk, dv = _AT._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, None, None, length, length, 0.0, True, *random_state, scale=scale
        )
    else:
        dq, dk, dv = _AT._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, True, scale=scale
        )
    return dq, dk, dv
