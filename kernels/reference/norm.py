"""Root-mean-square layer norm (Zhang and Sennrich 2019), computed in fp32 and cast back the way transformers does."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: [..., H]; weight: [H]. Returns x's shape and
    dtype.
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual). x, residual: [..., H] of one dtype, neither is changed; weight: [H].

    out_total: a place for the sum, [T, H] of x's dtype, whose rows may be strided; None makes one.
    """
    total = x + residual if out_total is None else torch.add(x, residual, out=out_total)
    return rms_norm(total, weight, eps), total
