"""The FlashInfer backend's plumbing: with a stand-in for the library on a CPU, with the library itself on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.flashinfer_backend import FlashInferAttention
from kernels.reference.attention import paged_attention
from kernels.reference.kv_write import write_kv
from tests.kernels.test_attention import Case, make_case
from tests.kernels.triton.device import call


class StandIn:
    """What the backend calls of FlashInfer's wrappers, by the references; `plans` counts."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.options = options
        self.plans = 0

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.is_contiguous()
        assert q.shape[0] == int(self.starts[-1])
        return paged_attention(q, *cache, self.starts, self.seq_lens, self.tables, self.scale, self.window)

    def _plan(
        self,
        query_starts: torch.Tensor,
        block_starts: torch.Tensor,
        indices: torch.Tensor,
        last_lens: torch.Tensor,
        block_size: int,
        options: dict[str, Any],
    ) -> None:
        self.plans += 1
        counts = block_starts[1:] - block_starts[:-1]
        assert indices.dtype == query_starts.dtype == block_starts.dtype == last_lens.dtype == torch.int32
        assert indices.shape == (int(block_starts[-1]),)
        assert bool((counts > 0).all())
        assert bool(((last_lens > 0) & (last_lens <= block_size)).all())
        self.starts = query_starts
        self.seq_lens = (counts - 1) * block_size + last_lens
        self.tables = torch.zeros((counts.shape[0], int(counts.max())), dtype=torch.int32)
        for row, (first, last) in enumerate(zip(block_starts[:-1].tolist(), block_starts[1:].tolist(), strict=True)):
            self.tables[row, : last - first] = indices[first:last]
        self.scale = options["sm_scale"]
        self.window = None if options["window_left"] < 0 else options["window_left"] + 1
        assert options["q_data_type"] == options["kv_data_type"]


class Prefill(StandIn):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        assert causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 64)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, options)


class Decode(StandIn):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim) == (4, 2, 64)
        starts = torch.arange(indptr.shape[0], dtype=torch.int32)
        self._plan(starts, indptr, indices, last_page_len, page_size, options)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper = Prefill, Decode
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("kernels.attention.flashinfer_backend.WORKSPACE_BYTES", 16)


STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([9, 3, 31], [1, 1, 1]),
    "verify rows, one that does not run": ([9, 3, 12], [5, 0, 2]),
    "mixed": ([0, 7, 20], [40, 1, 3]),
    "nothing": ([4], [0]),
}


def expected_of(case: Case, window: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, keys, values) by the references."""
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    metadata = case.metadata
    write_kv(case.k, case.v, metadata.slot_mapping, k_cache, v_cache)
    rows = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
    return paged_attention(case.q, k_cache, v_cache, *rows, 0.3, window), k_cache, v_cache


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", list(STEPS))
def test_rows_reach_the_library_and_come_back(name: str, window: int | None) -> None:
    """Padded tokens behind the rows, and a padded row with a token of its own in front."""
    backend = FlashInferAttention(4, 2, 64, 0.3, window)
    for in_front in (False, True):
        context, query = STEPS[name]
        case = make_case(
            ([2, *context] if in_front else context),
            ([1, *query] if in_front else query),
            heads=(4, 2),
            head_dim=64,
            padded_tokens=2,
            dtype=torch.float16,
        )
        if in_front:
            metadata = case.metadata
            assert metadata.seq_lens_np is not None
            lens = metadata.seq_lens_np.copy()
            lens[0] = 0
            slots = metadata.slot_mapping.clone()
            slots[0] = -1
            case = replace(
                case,
                metadata=replace(metadata, seq_lens_np=lens, seq_lens=torch.from_numpy(lens), slot_mapping=slots),
            )
        result, keys, values = expected_of(case, window)
        plan = backend.plan(case.metadata)
        for _ in range(2):  # layers
            got = plan.run(case.q, case.k, case.v, case.k_cache, case.v_cache)
            torch.testing.assert_close(got, result, rtol=1e-3, atol=1e-3)
        assert torch.equal(case.k_cache.nan_to_num(), keys.nan_to_num())
        assert torch.equal(case.v_cache.nan_to_num(), values.nan_to_num())
    # One library plan a step, however many layers.
    assert sum(wrapper.plans for wrapper in backend._wrappers.values()) == (0 if name == "nothing" else 2)


@pytest.mark.usefixtures("library")
def test_forms_of_rows_have_their_own_kernels() -> None:
    backend = FlashInferAttention(4, 2, 64, 0.3, None)
    for context, query in STEPS.values():
        case = make_case(context, query, heads=(4, 2), head_dim=64, dtype=torch.float16)
        backend.plan(case.metadata).run(case.q, case.k, case.v, case.k_cache, case.v_cache)
    assert {form: wrapper.options for form, wrapper in backend._wrappers.items()} == {
        "decode": {"use_tensor_cores": False},
        "short": {"backend": "fa2"},
        "long": {"backend": "auto"},
    }


def test_what_it_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of 80"):
        FlashInferAttention(4, 2, 80, 0.3, None)
    backend = FlashInferAttention(4, 2, 64, 0.3, None)
    assert backend.needs_host_lens
    case = make_case([3], [1], heads=(4, 2), head_dim=64)
    with pytest.raises(ValueError, match="seq_lens_np"):
        backend.plan(replace(case.metadata, seq_lens_np=None))
    with pytest.raises(ValueError, match="query_start_loc_np"):
        backend.plan(replace(case.metadata, query_start_loc_np=None))
    with pytest.raises(ValueError, match="float32"):
        backend.plan(case.metadata).run(case.q, case.k, case.v, case.k_cache, case.v_cache)


ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None,
    reason="no CUDA device on this machine" if not torch.cuda.is_available() else "flashinfer is not installed",
)


@ON_GPU
@pytest.mark.timeout(600)  # the library compiles at its first use
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("context", "query"), [([700, 3, 31], [1, 1, 1]), ([500, 3, 900], [5, 0, 2]), ([0, 300, 20], [400, 1, 3])]
)
def test_the_library_itself(context: list[int], query: list[int], window: int | None) -> None:
    """Against the reference and Triton, several steps in a row so that plans follow each other closely."""
    from kernels.attention.triton_backend import TritonAttention

    backend, other = FlashInferAttention(8, 2, 128, 0.09, window), TritonAttention(8, 2, 128, 0.09, window)
    for seed in range(4):
        case = make_case(
            [length + seed for length in context],
            query,
            heads=(8, 2),
            head_dim=128,
            block_size=16,
            padded_tokens=seed,
            seed=seed,
            dtype=torch.bfloat16,
        )
        metadata = case.metadata
        tables = torch.from_numpy(np.minimum(metadata.block_tables.numpy(), 0xFFFF))
        moved = replace(
            metadata,
            query_start_loc=metadata.query_start_loc.cuda(),
            seq_lens=metadata.seq_lens.cuda(),
            block_tables=tables.cuda(),
            slot_mapping=metadata.slot_mapping.cuda(),
        )
        k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
        write_kv(case.k, case.v, metadata.slot_mapping, k_cache, v_cache)
        rows = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
        expected = paged_attention(case.q.float(), k_cache.float(), v_cache.float(), *rows, 0.09, window)
        for way in (backend, other):
            tensors = [tensor.cuda() for tensor in (case.q, case.k, case.v, case.k_cache, case.v_cache)]
            got = call(way.plan(moved).run, *tensors)
            torch.testing.assert_close(got.float().cpu(), expected, rtol=2e-2, atol=2e-2)
