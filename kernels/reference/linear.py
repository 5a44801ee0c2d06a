"""What does a linear layer of few rows compute? Products, and what is done to them before they are written."""

from __future__ import annotations

import torch

from kernels.reference.activation import silu_mul


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
