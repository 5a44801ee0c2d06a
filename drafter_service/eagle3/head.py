"""What does an EAGLE-3 head compute?

Li et al. 2025 (EAGLE-3), one decoder layer. With the target's captured states of position p and the token at p + 1:

    g = fc(concat of the captured states)                        [T, H]
    x = concat(input_layernorm(embed(token)), hidden_norm(g))    [T, 2H] -> q, k, v
    r = g + o_proj(attention)          (the residual is g itself, un-normed)
    a = r + mlp(post_attention_layernorm(r))                     the output; the next draft step takes it in g's place
    logits = lm_head(norm(a))                                    over the draft vocabulary

The module is plain: Parameters, tensors in and out, attention through the plan that the caller passes. So the drafter
runs it on its paged cache, and a trainer under autograd with a plan of its own. `pack` makes its inference form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from drafter_service.eagle3.config import Eagle3Config, rotary_frequencies
from engine.errors import ModelError
from engine.linear import PackedLinear
from kernels.attention.interface import AttentionPlan
from kernels.reference.activation import silu_mul
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope

_LINEAR = ("fc", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


class Norm(nn.Module):
    """RMSNorm with a weight; float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Eagle3Head(nn.Module):
    """The head. `embed_tokens` is [vocab_size, H], shared with the target unless the checkpoint brings its own.

    Buffers: d2t [draft_vocab_size] int64, target id = draft id + d2t[draft id]; t2d [vocab_size] bool, whether a target
    id is in the draft vocabulary. Fused weights: `qkv_proj` rows are q, then k, then v; `gate_up_proj` gate, then up.
    """

    embed_tokens: nn.Parameter | None
    d2t: torch.Tensor
    t2d: torch.Tensor
    inv_freq: torch.Tensor
    fc: Callable[[torch.Tensor], torch.Tensor]
    qkv_proj: Callable[[torch.Tensor], torch.Tensor]
    o_proj: Callable[[torch.Tensor], torch.Tensor]
    gate_up_proj: Callable[[torch.Tensor], torch.Tensor]
    down_proj: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, heads_width = config.hidden_size, config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        captured_width = config.num_captured * config.target_hidden_size
        self.embed_tokens = None
        self.fc = nn.Linear(captured_width, hidden, bias=False)
        self.qkv_proj = nn.Linear(2 * hidden, heads_width + 2 * kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads_width, hidden, bias=config.attention_bias)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=config.mlp_bias)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.input_layernorm = Norm(hidden, config.rms_eps)
        self.hidden_norm = Norm(hidden, config.rms_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_eps)
        self.norm = Norm(hidden, config.rms_eps)
        self.input_norm = Norm(captured_width, config.rms_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(Norm(config.target_hidden_size, config.rms_eps) for _ in range(config.num_captured))
            if config.fc_norm
            else None
        )
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[: config.draft_vocab_size] = True
        self.register_buffer("t2d", t2d)
        inv_freq, self.rope_factor = rotary_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def attach_embedding(self, weight: torch.Tensor) -> None:
        """Use `weight` [vocab_size, H], not copied when dtype and device agree, as a frozen token embedding."""
        if tuple(weight.shape) != (self.config.vocab_size, self.config.hidden_size):
            wanted = (self.config.vocab_size, self.config.hidden_size)
            raise ModelError(f"token embedding is {tuple(weight.shape)}, the EAGLE-3 head takes {wanted}")
        like = self.norm.weight
        self.embed_tokens = nn.Parameter(weight.detach().to(like.device, like.dtype), requires_grad=False)

    def set_draft_vocab(self, target_ids: torch.Tensor) -> None:
        """The draft vocabulary: strictly ascending target ids [draft_vocab_size]."""
        ids = target_ids.to(self.d2t.device, torch.int64)
        if tuple(ids.shape) != (self.config.draft_vocab_size,):
            raise ModelError(f"{ids.numel()} target ids for a draft vocabulary of {self.config.draft_vocab_size}")
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.config.vocab_size:
            raise ModelError("draft vocabulary: target ids must ascend within the target's vocabulary")
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target token ids of draft ids, any shape, int64."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """[T, A * target_hidden_size] captured target states -> g [T, H]."""
        captured = captured.to(self.norm.weight.dtype)
        if self.input_norm is not None:
            captured = self.input_norm(captured)
        if self.fc_norm is not None:
            parts = captured.split(self.config.target_hidden_size, dim=-1)
            captured = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(captured)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """One pass of the layer: `project`, attend, `finish`.

        token_ids: [T] int64, the token *after* each position. hidden: [T, H], g (`fuse`) or the last pass'
        `next_hidden`. positions: [T] int64. Returns a [T, H], before the final norm.
        """
        q, k, v, residual = self.project(token_ids, hidden, positions)
        return self.finish(plan.run(q, k, v, k_cache, v_cache), residual)

    def project(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], residual [T, H]) of T tokens; q and k are rotated.

        In a one-layer model the KV of a token depends on nothing but its own token and hidden state, so whoever only
        wants the KV written stops here.
        """
        if self.embed_tokens is None:
            raise ModelError("the EAGLE-3 head has no token embedding: attach_embedding first")
        config = self.config
        normed = self.hidden_norm(hidden)
        residual = normed if config.norm_before_residual else hidden
        embedded = self.input_layernorm(nn.functional.embedding(token_ids, self.embed_tokens))
        qkv = self.qkv_proj(torch.cat((embedded, normed), dim=-1)).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        cos, sin = self.rotary(positions)
        q, k = apply_rope(q, k, cos, sin)
        return q, k, v, residual

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer after its attention. attended: [N, Hq, D]; residual: [N, H], from `project`. Returns a [N, H]."""
        residual = residual + self.o_proj(attended.reshape(attended.shape[0], -1))
        return residual + self.down_proj(silu_mul(self.gate_up_proj(self.post_attention_layernorm(residual))))

    def next_hidden(self, output: torch.Tensor) -> torch.Tensor:
        """What the next draft step takes as `hidden`, from `forward`'s output [N, H]."""
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """`forward`'s output [N, H] -> logits over the draft vocabulary [N, draft_vocab_size] float32."""
        return self.lm_head(self.norm(output)).float()

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, head_dim / 2] in the head's dtype."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        dtype = self.norm.weight.dtype
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)

    def pack(self) -> None:
        """Turn the linear layers into their inference form, in place. No training and no writing to a file after it."""
        for name in _LINEAR:
            linear = getattr(self, name)
            if isinstance(linear, nn.Linear):
                bias = None if linear.bias is None else linear.bias.detach()
                packed = PackedLinear(linear.weight.detach(), bias)
                delattr(self, name)
                setattr(self, name, packed)
        self.requires_grad_(False)
