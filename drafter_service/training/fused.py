"""What do training's small operations compute, and when are they one kernel?

Each function here means what its namesake in `kernels.reference` means. On a GPU it is one Triton kernel with a
backward pass of its own (see `fused_kernels`), on a CPU plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.reference import activation, norm
from kernels.reference.rope import apply_rope


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[N, H] -> [N, H]."""
    if not x.is_cuda:
        return norm.rms_norm(x, weight, eps)
    out: torch.Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), without a gradient on a GPU."""
    if not x.is_cuda:
        return norm.rms_norm_residual(x, residual, weight, eps)
    from drafter_service.training import fused_kernels

    normed, total, _ = fused_kernels.norm_forward(x, residual, weight, eps)
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2I] -> [N, I]."""
    if not gate_up.is_cuda:
        return activation.silu_mul(gate_up)
    out: torch.Tensor = _SiluMul.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def rotate(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv: [N, Hq + 2 * Hkv, D]; cos, sin: [N, D / 2]. Returns (q, k, v), q and k rotated."""
    if not qkv.is_cuda or qkv.shape[-1] & (qkv.shape[-1] - 1):
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return *apply_rope(q, k, cos, sin), v
    turned, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    rotated: torch.Tensor = _Rotate.apply(turned, cos, sin)  # type: ignore[no-untyped-call]
    return rotated[:, :num_heads], rotated[:, num_heads:], v


def soft_cross_entropy(
    logits: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy [N] float32 of logits [N, V] to the distributions probs[rows], argmax of each row [N])."""
    if not logits.is_cuda:
        wide = logits.float()
        return wide.logsumexp(-1) - (probs[rows] * wide).sum(-1), wide.detach().argmax(-1)
    loss, best = _SoftEntropy.apply(logits, probs, rows)  # type: ignore[no-untyped-call]
    return loss, best


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N] float32, without a gradient."""
    if not logits.is_cuda:
        return logits.float().logsumexp(-1)
    from drafter_service.training import fused_kernels

    return fused_kernels.logsumexp(logits)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from drafter_service.training import fused_kernels

        out, total, scale = fused_kernels.norm_forward(x, None, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        from drafter_service.training import fused_kernels

        return *fused_kernels.norm_backward(gradients[0], *ctx.saved_tensors), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        from drafter_service.training import fused_kernels

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return fused_kernels.silu_mul_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        from drafter_service.training import fused_kernels

        return fused_kernels.silu_mul_backward(gradients[0], *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        from drafter_service.training import fused_kernels

        ctx.save_for_backward(cos, sin)
        return fused_kernels.rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        from drafter_service.training import fused_kernels

        cos, sin = ctx.saved_tensors
        return fused_kernels.rotate(gradients[0].contiguous(), cos, sin, -1.0), None, None


class _SoftEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from drafter_service.training import fused_kernels

        logits = logits.contiguous()
        loss, lse, best = fused_kernels.soft_entropy_forward(logits, probs, rows)
        ctx.save_for_backward(logits, probs, rows, lse)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        from drafter_service.training import fused_kernels

        return fused_kernels.soft_entropy_backward(gradients[0], *ctx.saved_tensors), None, None
