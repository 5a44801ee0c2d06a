"""How does an EAGLE-3 head run on a device's own kernels?

The same arithmetic as `eagle3/head.py`, for inference only: products in their inference form, norms fused with the
residual, rotation with the write of the KV. Nothing here waits for the device, so all of it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from drafter_service.eagle3.config import rotary_frequencies
from drafter_service.eagle3.head import Eagle3Head
from engine.errors import ModelError
from engine.linear import PackedLinear
from kernels.attention.interface import RotatingPlan
from kernels.kernel_set import KernelSet


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """normed: [N, H], what the logits are made from. hidden: [N, H], what the next draft step takes."""

    normed: torch.Tensor
    hidden: torch.Tensor


class HeadRunner:
    """A head with its embedding attached, ready to run. Weights are the head's own."""

    def __init__(self, head: Eagle3Head, kernels: KernelSet) -> None:
        if head.embed_tokens is None:
            raise ModelError("the EAGLE-3 head has no token embedding: attach_embedding first")
        self._head = head
        self._kernels = kernels
        self.config = head.config
        self.dtype = head.norm.weight.dtype
        self.device = head.norm.weight.device
        self._embedding = head.embed_tokens
        # In float32 whatever the weights are: a position of some thousands times a rounded frequency is another angle.
        self._inv_freq = rotary_frequencies(head.config)[0].to(self.device)
        self._fc = _packed(head.fc)
        self._qkv = _packed(head.qkv_proj)
        self._out = _packed(head.o_proj)
        self._gate_up = _packed(head.gate_up_proj)
        self._down = _packed(head.down_proj)
        self._lm_head = _packed(head.lm_head)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """[T, A * target_hidden_size] captured target states -> g [T, H]."""
        head = self._head
        captured = captured.to(self.dtype)
        if head.input_norm is not None:
            captured = self._norm(captured, head.input_norm.weight)
        if head.fc_norm is not None:
            parts = captured.split(self.config.target_hidden_size, dim=-1)
            # A module's attributes are typed as tensor or module: these are the norms' own weights.
            weights = [cast(torch.Tensor, norm.weight) for norm in head.fc_norm.children()]
            normed = [self._norm(part, weight) for part, weight in zip(parts, weights, strict=True)]
            captured = torch.cat(normed, dim=-1)
        return self._fc(captured)

    def write_kv(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T tokens' KV to their slots. Returns (q [T, Hq, D], rotated; residual [T, H]).

        token_ids: [T] int64, the token *after* each position. hidden: [T, H] from `fuse`. positions, slots: [T] int64.
        """
        q, k, v, residual = self._project(token_ids, hidden)
        cos, sin = self._angles(positions)
        rotated = self._kernels.rope_kv_write(q, k, v, cos, sin, slots, k_cache, v_cache)
        return rotated, residual

    def step(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: RotatingPlan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> HeadOutput:
        """One draft step: N rows of one token; its KV is written where the plan says."""
        q, k, v, residual = self._project(token_ids, hidden)
        cos, sin = self._angles(positions)
        return self.finish(plan.run_rotating(q, k, v, cos, sin, k_cache, v_cache), residual)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> HeadOutput:
        """The layer after its attention. attended: [N, Hq, D]; residual: [N, H]."""
        head, kernels, eps = self._head, self._kernels, self.config.rms_eps
        projected = self._out(attended.reshape(attended.shape[0], -1))
        weight = head.post_attention_layernorm.weight
        normed, residual = kernels.rms_norm_residual(projected, residual, weight, eps)
        mlp = self._down(self._gate_up.silu_mul(normed))
        normed, output = kernels.rms_norm_residual(mlp, residual, head.norm.weight, eps)
        return HeadOutput(normed, normed if self.config.norm_output else output)

    def logits(self, output: HeadOutput) -> torch.Tensor:
        """Over the draft vocabulary, [N, draft_vocab_size] float32."""
        return self._lm_head.float32(output.normed)

    def _project(
        self, token_ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v, not rotated; residual)."""
        head, config = self._head, self.config
        norms = (head.input_layernorm.weight, head.hidden_norm.weight)
        inputs = self._kernels.head_inputs(token_ids, self._embedding, hidden, *norms, config.rms_eps)
        residual = inputs[:, config.hidden_size :] if config.norm_before_residual else hidden
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self._qkv(inputs).view(-1, heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        return q, k, v, residual

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.rotary_angles(positions, self._inv_freq, self._head.rope_factor, self.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, self.config.rms_eps)


def _packed(linear: object) -> PackedLinear:
    if isinstance(linear, PackedLinear):
        return linear
    assert isinstance(linear, nn.Linear), "an EAGLE-3 head's products are linear layers"
    return PackedLinear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
