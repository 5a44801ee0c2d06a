"""How does attention run on a GPU without the host knowing a length?

Everything a layer reads of a step is on the device, in the buffers that the metadata names: a plan is a view of them,
costs the host nothing, and may be captured in a graph that is replayed after the buffers have moved on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.attention.interface import AttentionMetadata
from kernels.triton.attention import attend, choose_tiling
from kernels.triton.kv_write import write_kv
from kernels.triton.rope_kv_write import rope_kv_write


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Paged attention in Triton. A frozen value: any number of plans may be alive at once.

    num_heads, num_kv_heads, head_dim: of the layer (or of a shard of it); scale: of the scores; window: how many last
    positions a token sees, itself included, or None for all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    name: str = field(default="triton", init=False)
    needs_host_lens: bool = field(default=False, init=False)

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        """Prepare one step: max_query_len and max_seq_len bound it, lengths are read on the device at each `run`."""
        return TritonPlan(self, metadata)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's plan."""

    backend: TritonAttention
    metadata: AttentionMetadata

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write k, v to their slots, then attend: see AttentionPlan.run. Tokens of no row, or of padded rows, get
        zeros.
        """
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
        """`run` on q and k that have no rotary embedding yet (`rope_kv_write` says what cos and sin are), in one launch
        fewer than `apply_rope` and `run`.
        """
        rotated = rope_kv_write(q, k, v, cos, sin, self.metadata.slot_mapping, k_cache, v_cache)
        return self.attend(rotated, k_cache, v_cache)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend over what the cache holds already; nothing is written."""
        backend, metadata = self.backend, self.metadata
        return attend(
            q,
            k_cache,
            v_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            backend.scale,
            backend.window,
            metadata.max_query_len,
            metadata.max_seq_len,
            choose_tiling(q.device, backend.num_kv_heads, backend.head_dim, q.element_size()),
        )
