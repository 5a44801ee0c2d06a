"""Where does the KV of every layer lie?

Two tensors a layer, `[num_blocks, block_size, num_kv_heads, head_dim]`, cut from one allocation and zeroed: a slot
that was never written reads as zeros, not as whatever NaN lay there.
"""

from __future__ import annotations

import torch


class KVCache:
    """Paged keys and values of `num_layers` layers of one shape. Block ids mean the same in every layer."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        storage = torch.zeros(
            (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), dtype=dtype, device=self.device
        )
        self._k = [storage[layer, 0] for layer in range(num_layers)]
        self._v = [storage[layer, 1] for layer in range(num_layers)]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer: [num_blocks, block_size, Hkv, D]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer: [num_blocks, block_size, Hkv, D]."""
        return self._v[layer]

    @staticmethod
    def bytes_per_block(block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory that one block takes over all layers, in bytes."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
