"""How does attention run on FlashInfer's kernels?

FlashInfer plans a step on the host, once, from the rows' exact lengths, and every layer runs by that plan: this backend
therefore needs host lengths and serves steps whose lengths the host knows. (A plan for upper bounds would let a row see
keys past its end; FlashInfer masks by the planned lengths, so it is refused rather than offered.) Keys and values are
written by our own kernel, in the same launch as the rotary embedding where that is asked for.

Written to the keyword arguments of flashinfer-python 0.6.18; 0.7 takes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.attention.interface import AttentionMetadata
from kernels.kernel_set import kernels_for
from kernels.layout import blocks_needed

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# FlashInfer's own recommendation for what its split rows leave between two launches.
WORKSPACE_BYTES = 128 << 20
# Rows of up to this many query tokens run on the kernels that are made for few; longer ones on the device's best.
SHORT_LEN = 16


class FlashInferAttention:
    """Paged attention by FlashInfer. One plan is alive at a time. Used by one thread and one stream.

    num_heads, num_kv_heads, head_dim: of the layer (or of a shard of it); scale: of the scores; window: how many last
    positions a token sees, itself included, or None for all of them. Raises ValueError for a shape that FlashInfer's
    kernels are not made for.
    """

    name = "flashinfer"
    needs_host_lens = True

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None = None
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"attention: flashinfer has no kernel for heads of {head_dim}, only {HEAD_DIMS}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[str, Any] = {}
        # Of each wrapper: its last plan's copies from the staging buffer that the next plan overwrites.
        self._copied: dict[str, torch.cuda.Event] = {}

    def plan(self, metadata: AttentionMetadata) -> FlashInferPlan:
        """Prepare one step. Raises ValueError where the metadata has no host lengths.

        The cache's block size and the dtype are learnt from the first `run`, so FlashInfer plans there, once.
        """
        if metadata.query_start_loc_np is None:
            raise ValueError("metadata.query_start_loc_np: the flashinfer attention backend needs it")
        if metadata.seq_lens_np is None:
            raise ValueError("metadata.seq_lens_np: the flashinfer attention backend needs it")
        return FlashInferPlan(self, metadata, metadata.query_start_loc_np, metadata.seq_lens_np)

    def plan_rows(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        indices: torch.Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> Any:
        """A wrapper that has planned rows which all run. query_lens, seq_lens: [N]; indices: the rows' block ids one
        after the other, int32, on the device. Waits for the device only where its last plan has not reached it yet.
        """
        if dtype not in DTYPES:
            raise ValueError(f"attention: flashinfer has no kernel for {dtype}, only bfloat16 and float16")
        longest = int(query_lens.max())
        form = "decode" if longest == 1 else "short" if longest <= SHORT_LEN else "long"
        wrapper = self._wrapper(form, indices.device)
        if form in self._copied:
            self._copied[form].synchronize()
        block_counts = np.array([blocks_needed(int(length), block_size) for length in seq_lens], np.int32)
        block_starts = torch.from_numpy(np.concatenate(([0], block_counts.cumsum())).astype(np.int32))
        last_lens = torch.from_numpy((seq_lens - (block_counts - 1) * block_size).astype(np.int32))
        shared = {
            "sm_scale": self.scale,
            "window_left": -1 if self.window is None else self.window - 1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        if form == "decode":
            wrapper.plan(
                *(block_starts, indices, last_lens, self.num_heads, self.num_kv_heads, self.head_dim, block_size),
                **shared,
            )
        else:
            query_starts = torch.from_numpy(np.concatenate(([0], query_lens.cumsum())).astype(np.int32))
            wrapper.plan(
                *(query_starts, block_starts, indices, last_lens),
                *(self.num_heads, self.num_kv_heads, self.head_dim, block_size),
                causal=True,
                **shared,
            )
        if indices.is_cuda:
            event = self._copied.setdefault(form, torch.cuda.Event())
            event.record(torch.cuda.current_stream(indices.device))
        return wrapper

    def _wrapper(self, form: str, device: torch.device) -> Any:
        """FlashInfer's object for one kind of rows, made at its first use. All share one workspace: they run one after
        the other.
        """
        if form not in self._wrappers:
            import flashinfer

            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            if form == "decode":
                # Few query heads to a KV head do not fill a tile of the matrix units.
                group = self.num_heads // self.num_kv_heads
                self._wrappers[form] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=group >= 4
                )
            else:
                self._wrappers[form] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, "NHD", backend="fa2" if form == "short" else "auto"
                )
        return self._wrappers[form]


class FlashInferPlan:
    """One step's plan. Valid until the backend's next one."""

    def __init__(
        self,
        backend: FlashInferAttention,
        metadata: AttentionMetadata,
        query_start_loc_np: np.ndarray,
        seq_lens_np: np.ndarray,
    ) -> None:
        self._backend = backend
        self._metadata = metadata
        self._kernels = kernels_for(metadata.slot_mapping.device)
        starts = query_start_loc_np.astype(np.int64)
        query_lens = starts[1:] - starts[:-1]
        self._rows = np.flatnonzero((query_lens > 0) & (seq_lens_np > 0))
        self._query_lens = query_lens[self._rows]
        self._seq_lens = seq_lens_np[self._rows].astype(np.int64)
        self._starts = starts[:-1][self._rows]
        self._wrapper: Any = None
        self._tokens: torch.Tensor | None = None

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionPlan.run. Tokens of no row, or of padded rows, get zeros."""
        self._kernels.write_kv(k, v, self._metadata.slot_mapping, k_cache, v_cache)
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
        rotated = self._kernels.rope_kv_write(q, k, v, cos, sin, self._metadata.slot_mapping, k_cache, v_cache)
        return self.attend(rotated, k_cache, v_cache)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend over what the cache holds already; nothing is written."""
        if self._rows.shape[0] == 0:
            return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if self._wrapper is None:
            self._wrapper = self._plan(q, k_cache.shape[1])
        num_tokens = int(self._query_lens.sum())
        if self._tokens is None and num_tokens == q.shape[0]:
            attended: torch.Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
            return attended
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if self._tokens is None:
            out[:num_tokens] = self._wrapper.run(q[:num_tokens].contiguous(), (k_cache, v_cache))
        else:
            out[self._tokens] = self._wrapper.run(q[self._tokens], (k_cache, v_cache))
        return out

    def _plan(self, q: torch.Tensor, block_size: int) -> Any:
        """Let FlashInfer plan the rows that run, and remember which tokens are theirs where they are not the first."""
        tables = self._metadata.block_tables
        columns = [
            row * tables.shape[1] + np.arange(blocks_needed(int(length), block_size))
            for row, length in zip(self._rows.tolist(), self._seq_lens, strict=True)
        ]
        where = torch.from_numpy(np.concatenate(columns)).to(tables.device)
        indices = tables.reshape(-1)[where].to(torch.int32)
        expected = np.concatenate(([0], self._query_lens.cumsum()))[:-1]
        if not np.array_equal(expected, self._starts):
            tokens = [start + np.arange(length) for start, length in zip(self._starts, self._query_lens, strict=True)]
            self._tokens = torch.from_numpy(np.concatenate(tokens)).to(q.device)
        return self._backend.plan_rows(self._query_lens, self._seq_lens, indices, block_size, q.dtype)
