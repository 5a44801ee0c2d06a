"""How does attention run where nothing may be known on the host, and no GPU is there?

The reference kernels behind the backends' interface. It asks for no host lengths, as the backends of a GPU do, so that
what is written for a GPU runs on a CPU as it stands. Slow, and it does wait for the device: for tests, not for serving.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.attention.interface import AttentionMetadata
from kernels.reference.attention import paged_attention
from kernels.reference.kv_write import write_kv
from kernels.reference.rope_kv_write import rope_kv_write


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Paged attention as `kernels.reference` has it. A frozen value: any number of plans may be alive at once.

    num_heads, num_kv_heads, head_dim: of the layer (or of a shard of it); scale: of the scores; window: how many last
    positions a token sees, itself included, or None for all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    name: str = field(default="reference", init=False)
    needs_host_lens: bool = field(default=False, init=False)

    def plan(self, metadata: AttentionMetadata) -> ReferencePlan:
        """Prepare one step: a view of the metadata's buffers, read at each `run`."""
        return ReferencePlan(self, metadata)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """One step's plan."""

    backend: ReferenceAttention
    metadata: AttentionMetadata

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan.run. Tokens of no row, or of padded rows, get zeros."""
        write_kv(k, v, self.metadata.slot_mapping, k_cache, v_cache)
        return self.attend(q, k_cache, v_cache)

    def run_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See RotatingPlan.run_rotating."""
        rotated = rope_kv_write(q, k, v, cos, sin, self.metadata.slot_mapping, k_cache, v_cache)
        return self.attend(rotated, k_cache, v_cache)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend over what the cache holds already; nothing is written."""
        metadata = self.metadata
        return paged_attention(
            q,
            k_cache,
            v_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.backend.scale,
            self.backend.window,
        )
