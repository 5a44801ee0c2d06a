"""What does an attention backend take and give?

One interface for every backend (torch, triton, flashinfer): `plan` once a step, `run` once a layer. Rows of any
`(context_len, query_len)` mix in one batch. A backend never learns what a request is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from kernels.layout import PAD_SLOT as PAD_SLOT


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Everything attention needs to know of one step and one KV group.

    Shapes: R rows, T query tokens (Tp padded, Tp >= T), B blocks per row at most.

    query_start_loc: [R + 1] int32, first query token of each row; flat over rows that do not run.
    seq_lens: [R] int32, KV length of each row *including* this step's query tokens; 0 for padded rows.
    block_tables: [R, B] int32; entries past the row's length are never read.
    slot_mapping: [Tp] int64, cache slot of each query token's KV; PAD_SLOT: not written.
    max_query_len, max_seq_len: host upper bounds over the rows.
    query_start_loc_np, seq_lens_np: host twins, exact, or None where the host does not know them (run-ahead);
        a backend whose `needs_host_lens` is true refuses None.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_np: np.ndarray | None = None
    seq_lens_np: np.ndarray | None = None


class AttentionPlan(Protocol):
    """What one `plan` call prepared for one step; valid until the backend's next `plan`."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write this step's k, v to their slots, then attend causally over each row's cache.

        q: [T, Hq, D]; k, v: [T, Hkv, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D]. Returns [T, Hq, D].
        A row's query token j (of query_len) sees positions 0 .. seq_len - query_len + j.
        """
        ...


@runtime_checkable
class RotatingPlan(AttentionPlan, Protocol):
    """A plan that also takes queries and keys before their rotary embedding, and spends one launch less on it."""

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
        """`run` on q and k that are not rotated yet. cos, sin: [T, D/2] (`kernels.reference.rope.rotary_angles`)."""
        ...

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend with a q that is rotated, over what the cache holds already; nothing is written."""
        ...


class AttentionBackend(Protocol):
    """A way to run paged attention. `num_heads`, `num_kv_heads`, `head_dim`, `scale`, `window` are fixed when it is
    made.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_host_lens(self) -> bool: ...

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan: ...
