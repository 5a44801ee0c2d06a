"""What does a linear layer of few rows compute? Products, and what is done to them before they are written."""

from __future__ import annotations

import torch

from kernels.reference.activation import silu_mul
from kernels.reference.norm import rms_norm, rms_norm_residual


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; weight: [N, K]; bias: [N] or None. Returns [M, N] of out_dtype, or of x's dtype;
    products are summed in float32 and rounded once.
    """
    wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(out_dtype or x.dtype)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of `linear`, whose output is [gate, up], rounded as the two kernels one after the other do.
    weight: [2I, K]. Returns [M, I].
    """
    return silu_mul(linear(x, weight, bias))


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear` of the normed x + residual, x + residual), rounded as the kernels one after the other do."""
    if residual is None:
        return linear(rms_norm(x, norm, eps), weight, bias), x
    normed, total = rms_norm_residual(x, residual, norm, eps)
    return linear(normed, weight, bias), total
