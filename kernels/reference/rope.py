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


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, times `scaling`; float32 until the last cast, as transformers has it.

    positions: [T] int64; inv_freq: [D/2] float32, radians per position. Returns two [T, D/2] of `dtype`.
    """
    angles = positions[:, None].to(torch.float32) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)
