"""What does the layer of an EAGLE-3 head read? The normed embedding of a token beside the normed hidden state."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from kernels.reference.norm import rms_norm


def head_inputs(
    token_ids: torch.Tensor,
    embed_weight: torch.Tensor,
    hidden: torch.Tensor,
    embed_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """[rms_norm(embedding of token t), rms_norm(hidden[t])] side by side.

    token_ids: [T] int64; embed_weight: [V, H]; hidden: [T, H], rows may be strided; embed_norm, hidden_norm: [H], all
    of one dtype. Returns [T, 2H].
    """
    embedded = rms_norm(embedding(token_ids, embed_weight), embed_norm, eps)
    return torch.cat((embedded, rms_norm(hidden, hidden_norm, eps)), dim=-1)
