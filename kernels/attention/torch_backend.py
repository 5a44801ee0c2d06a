"""How does attention run in plain torch, fast enough on a CPU?"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.attention.interface import AttentionMetadata
from kernels.reference.attention import paged_attention
from kernels.reference.kv_write import write_kv


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Paged attention in plain torch. num_heads, num_kv_heads, head_dim: of the model (or shard); scale: of the scores;
    window: how many last positions a token sees, itself included, or None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None

    name: str = field(default="torch", init=False)
    needs_host_lens: bool = field(default=True, init=False)

    def plan(self, metadata: AttentionMetadata) -> TorchPlan:
        """Raises ValueError where the metadata has no host lengths."""
        if metadata.query_start_loc_np is None or metadata.seq_lens_np is None:
            raise ValueError("metadata: the torch attention backend needs query_start_loc_np and seq_lens_np")
        return TorchPlan(self, metadata)


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """One step's plan."""

    backend: TorchAttention
    metadata: AttentionMetadata

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        write_kv(k, v, self.metadata.slot_mapping, k_cache, v_cache)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            self.metadata.query_start_loc,
            self.metadata.seq_lens,
            self.metadata.block_tables,
            self.backend.scale,
            self.backend.window,
        )
