"""How do a step's keys and values get into the paged cache?"""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Copy token i's k, v to cache slot slots[i]; PAD_SLOT is skipped.

    k, v: [T, Hkv, D]; slots: [>= T] int64; k_cache, v_cache: [num_blocks, block_size, Hkv, D], written in place, cast
    to their dtype. Slots are distinct.
    """
    kept = torch.nonzero(slots[: k.shape[0]] >= 0).squeeze(1)
    where = slots[kept]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, where, k[kept].to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, where, v[kept].to(v_cache.dtype))
