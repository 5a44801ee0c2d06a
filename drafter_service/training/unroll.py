"""What does the head see in draft step s, at every position of a text at once?

Training-time test (Li et al. 2025, EAGLE-3). Step 0 runs the head over the target's states, causally. In step s each
position t goes on from its own output of step s - 1 with the text's next token, one rotary position further, and
attends to the step-0 keys of positions 0..t and to its own chain's keys of steps 1..s. That is what the service
computes for a drafting that begins at t, because a draft's prefill rewrites its cache from true states every time. As
long as the drafts agree with the text, the text's tokens *are* the drafts, so the same pass also measures acceptance
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training import fused
from drafter_service.training.chain_attention import chained_attention, has_flash


class UnrollPlan:
    """Attention of one unrolled pass over B sequences of L positions: `run` is called once for each draft step, in
    order.

    Where there is no flash attention, the steps after the first hold [B, Hq, L, L + s] attention weights.
    """

    def __init__(self, batch: int, length: int, scale: float, device: torch.device) -> None:
        self._batch, self._length, self._scale = batch, length, scale
        positions = torch.arange(length, device=device)
        self._hidden_future = positions[None, :] > positions[:, None]
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chain: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """q: [B * L, Hq, D]; k, v: [B * L, Hkv, D]; the caches are ignored. Returns [B * L, Hq, D]."""
        del k_cache, v_cache
        group = q.shape[1] // k.shape[1]
        query, flash = self._heads(q), has_flash(q)
        heads = (self._heads(k), self._heads(v))
        # Chained flash attention takes the KV heads as they are.
        narrow = flash and self._first is not None
        key, value = heads if narrow else (x.repeat_interleave(group, dim=1) for x in heads)
        if self._first is None:
            self._first = heads if flash else (key, value)
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        else:
            self._chain.append((key, value))
            if flash:
                out = chained_attention(query, *self._first, self._chain, self._scale)
            else:
                out = self._chained(query, *self._first)
        return out.transpose(1, 2).reshape(q.shape)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self._batch, self._length, -1, x.shape[-1]).transpose(1, 2)

    def _chained(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.transpose(-1, -2)).masked_fill(self._hidden_future, float("-inf"))
        own = [(query * chain_key).sum(-1, keepdim=True) for chain_key, _ in self._chain]
        weights = (torch.cat([scores, *own], dim=-1).float() * self._scale).softmax(-1).to(value.dtype)
        out = weights[..., : self._length] @ value
        for index, (_, chain_value) in enumerate(self._chain):
            column = self._length + index
            out = out + weights[..., column : column + 1] * chain_value
        return out


def unroll(
    head: Eagle3Head, fused_states: torch.Tensor, token_ids: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yield the head's output [B * L, H] (before its final norm) of draft steps 0 .. num_steps - 1.

    fused_states: [B * L, H], `head.fuse` of the captured states. token_ids: [B, L]; tokens past a text's end count as
    0. Output t of step s proposes the token at t + 2 + s.
    """
    batch, length = token_ids.shape
    device = token_ids.device
    plan = UnrollPlan(batch, length, head.config.head_dim**-0.5, device)
    run = _run_fused if _is_plain(head.config) else _run_as_served
    positions = torch.arange(length, device=device).repeat(batch)
    hidden, ids = fused_states, token_ids
    for step in range(num_steps):
        ids = torch.cat((ids[:, 1:], ids.new_zeros((batch, 1))), dim=1)
        output = run(head, ids.reshape(-1), hidden, positions + step, plan)
        yield output
        hidden = head.next_hidden(output)


def draft_logits(head: Eagle3Head, output: torch.Tensor) -> torch.Tensor:
    """`head.logits` in the head's own dtype: [N, H] -> [N, draft_vocab_size]."""
    return head.lm_head(fused.rms_norm(output, head.norm.weight, head.norm.eps))


def _is_plain(config: Eagle3Config) -> bool:
    """Whether the layer is what `_run_fused` computes: all heads made here are."""
    return not (config.norm_before_residual or config.attention_bias or config.mlp_bias)


def _run_as_served(
    head: Eagle3Head, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: UnrollPlan
) -> torch.Tensor:
    output: torch.Tensor = head(ids, hidden, positions, plan, hidden, hidden)
    return output


def _run_fused(
    head: Eagle3Head, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: UnrollPlan
) -> torch.Tensor:
    """The same with `fused` operations between the products."""
    config, eps = head.config, head.config.rms_eps
    assert head.embed_tokens is not None
    embedded = fused.rms_norm(embedding(ids, head.embed_tokens), head.input_layernorm.weight, eps)
    normed = fused.rms_norm(hidden, head.hidden_norm.weight, eps)
    qkv = head.qkv_proj(torch.cat((embedded, normed), dim=-1))
    qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    q, k, v = fused.rotate(qkv, config.num_heads, config.num_kv_heads, *head.rotary(positions))
    attended = plan.run(q, k, v, q, q)
    residual = hidden + head.o_proj(attended.reshape(attended.shape[0], -1))
    inner = head.gate_up_proj(fused.rms_norm(residual, head.post_attention_layernorm.weight, eps))
    return residual + head.down_proj(fused.silu_mul(inner))
