"""How do a step's queries and keys get their rotary embedding, and its keys and values their place in the cache?

The two belong together on a GPU, where a layer of one token is a row of tiny launches: see the Triton form.
"""

from __future__ import annotations

import torch

from kernels.reference.kv_write import write_kv
from kernels.reference.rope import apply_rope


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k (`rope.apply_rope`), write the rotated k and v to their slots (`kv_write.write_kv`).

    q: [T, Hq, D]; k, v: [T, Hkv, D], neither is changed; cos, sin: [T, D/2], or [T, D] with both halves equal; slots:
    [>= T] int64, PAD_SLOT is skipped; k_cache, v_cache: [num_blocks, block_size, Hkv, D], written in place. Returns the
    rotated q [T, Hq, D] of q's dtype.
    """
    rotated_q, rotated_k = apply_rope(q, k, cos, sin)
    write_kv(rotated_k, v, slots, k_cache, v_cache)
    return rotated_q
