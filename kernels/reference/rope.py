"""Rotary position embedding (Su et al. 2021), the half-rotation form of Llama and its kin."""

from __future__ import annotations

import torch


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate dimension pairs (i, i + D/2) of every head by the token's angles.

    q: [T, Hq, D]; k: [T, Hkv, D]; cos, sin: [T, D/2], or [T, D] with both halves equal (as transformers has it).
    Returns new tensors of q's and k's shape and dtype.
    """
    half = q.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    # Both at once: for few tokens the cost is the number of operations, not their size.
    first, second = torch.cat((q, k), dim=1).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(q.dtype)
    return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]
