"""Paged attention in Triton: the kernel and the backend against the reference, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import layout
from kernels.attention.registry import make_attention
from kernels.attention.triton_backend import TritonAttention
from kernels.reference import rope as plain_rope
from kernels.triton.attention import Tiling, attend, choose_tiling, paged_attention
from tests.kernels.test_attention import Case, make_case, reference
from tests.kernels.triton.device import DEVICE, DTYPES, ON_GPU

# Small stretches and few programs: rows of a few dozen keys are split, and programs take several items each.
TILING = Tiling(
    block_keys=16,
    few_keys=16,
    many_keys=32,
    max_splits=4,
    num_programs=8,
    registers=255,
    num_stages=2,
    long_tile=32,
    long_keys=16,
    long_programs=3,
    long_stages=2,
    long_warps=4,
)
TOLERANCE = {torch.float32: 1e-5 if ON_GPU else 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def to_device(case: Case) -> Case:
    """The case with its tensors on the device under test, and no host lengths."""
    metadata = replace(
        case.metadata,
        query_start_loc=case.metadata.query_start_loc.to(DEVICE),
        seq_lens=case.metadata.seq_lens.to(DEVICE),
        block_tables=case.metadata.block_tables.to(DEVICE),
        slot_mapping=case.metadata.slot_mapping.to(DEVICE),
        query_start_loc_np=None,
        seq_lens_np=None,
    )
    tensors = {name: getattr(case, name).to(DEVICE) for name in ("q", "k", "v", "k_cache", "v_cache")}
    return replace(case, metadata=metadata, **tensors)


def run_kernel(case: Case, scale: float, window: int | None, tiling: Tiling = TILING) -> torch.Tensor:
    """`attend` on the case's cache with this step's KV in it."""
    case = to_device(case)
    metadata = case.metadata
    for new, cache in ((case.k, case.k_cache), (case.v, case.v_cache)):
        kept = metadata.slot_mapping[: new.shape[0]] >= 0
        cache.view(-1, *cache.shape[2:])[metadata.slot_mapping[: new.shape[0]][kept]] = new[kept]
    return attend(
        case.q,
        case.k_cache,
        case.v_cache,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_tables,
        scale,
        window,
        metadata.max_query_len,
        metadata.max_seq_len,
        tiling,
    )


def assert_equal_enough(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got.cpu().float(), expected.cpu().float(), rtol=tolerance, atol=tolerance)


# name: (context_lens, query_lens, query heads, KV heads, head_dim, cache block)
CASES: dict[str, tuple[list[int], list[int], int, int, int, int]] = {
    "one decode row, 3:1": ([70], [1], 3, 1, 64, 16),
    "one verify row, 4:1": ([45], [5], 4, 1, 128, 16),
    "decode rows of mixed lengths": ([3, 70, 0, 15, 16, 31], [1, 1, 1, 1, 1, 1], 6, 2, 16, 4),
    "verify rows, some empty": ([40, 9, 20], [5, 0, 3], 4, 2, 16, 16),
    "sixteen query tokens": ([33], [16], 3, 1, 16, 8),
    "a chunk beside short rows": ([3, 21, 40], [1, 37, 4], 3, 1, 16, 16),
    "chunks alone": ([0, 5], [17, 20], 4, 1, 16, 4),
    "a head_dim of no power of two": ([30], [2], 2, 2, 12, 5),
}


WINDOWS = [None, 1, 7, 40]
# Under the interpreter, where every launch takes its time, one window is enough for half precision.
KINDS = [(dtype, window) for dtype in DTYPES for window in (WINDOWS if ON_GPU or dtype == torch.float32 else [7])]


@pytest.mark.parametrize(("dtype", "window"), KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, window: int | None, dtype: torch.dtype) -> None:
    context_lens, query_lens, heads, kv_heads, head_dim, block_size = CASES[name]
    case = make_case(
        context_lens,
        query_lens,
        heads=(heads, kv_heads),
        head_dim=head_dim,
        block_size=block_size,
        padded_tokens=2,
        dtype=dtype,
    )
    got = run_kernel(case, 0.3, window)
    assert_equal_enough(got, reference(case, 0.3, window))
    assert (got[-2:] == 0).all()


@pytest.mark.parametrize("name", ["decode rows of mixed lengths", "a chunk beside short rows"])
def test_the_chosen_tiling_and_loose_bounds(name: str) -> None:
    """`paged_attention` knows no bounds but the shapes; the backend's tiling is the device's."""
    context_lens, query_lens, heads, kv_heads, head_dim, block_size = CASES[name]
    case = make_case(context_lens, query_lens, heads=(heads, kv_heads), head_dim=head_dim, block_size=block_size)
    expected = reference(case, 0.3, 9)
    moved = to_device(case)
    metadata = moved.metadata
    for cache, new in ((moved.k_cache, moved.k), (moved.v_cache, moved.v)):
        cache.view(-1, *cache.shape[2:])[metadata.slot_mapping] = new
    got = paged_attention(
        *(moved.q, moved.k_cache, moved.v_cache, metadata.query_start_loc, metadata.seq_lens),
        *(metadata.block_tables, 0.3, 9),
    )
    assert_equal_enough(got, expected)


def test_bounds_do_not_change_a_bit_and_neighbours_little() -> None:
    """Under looser bounds the very same numbers; alone, or with other programs, as near as ever."""
    case = make_case([70, 7, 33, 0], [1, 1, 1, 1], heads=(3, 1), head_dim=16, block_size=16)
    crowd = run_kernel(case, 0.25, None)
    loose = replace(case, metadata=replace(case.metadata, max_seq_len=4096))
    assert torch.equal(run_kernel(loose, 0.25, None), crowd)
    assert_equal_enough(run_kernel(case, 0.25, None, replace(TILING, num_programs=64)), crowd)
    for row in range(3):
        one = slice(row, row + 1)
        metadata = replace(
            case.metadata,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=case.metadata.seq_lens[one],
            block_tables=case.metadata.block_tables[one],
            slot_mapping=case.metadata.slot_mapping[one],
        )
        alone = replace(case, metadata=metadata, q=case.q[one], k=case.k[one], v=case.v[one])
        assert_equal_enough(run_kernel(alone, 0.25, None), crowd[one])


def test_padded_rows_and_rows_that_do_not_run_get_zeros() -> None:
    """A captured draft step: one token a row, a padded row's has seq_len 0 and slot PAD, a table of anything."""
    case = make_case([5, 50, 6], [1, 1, 1], padded_tokens=2)
    seq_lens = torch.tensor([6, 0, 7], dtype=torch.int32)
    slots = case.metadata.slot_mapping.clone()
    slots[1] = layout.PAD_SLOT
    padded = replace(
        case, metadata=replace(case.metadata, seq_lens=seq_lens, slot_mapping=slots, seq_lens_np=seq_lens.numpy())
    )
    got = run_kernel(padded, 0.3, None)
    expected = reference(case, 0.3, None)
    assert (got[[1, 3, 4]] == 0).all()
    assert_equal_enough(got[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("rows", [[0, 0], []])
def test_a_step_with_nothing_to_run(rows: list[int]) -> None:
    if rows:
        assert (run_kernel(make_case([4, 3], rows, padded_tokens=3), 0.3, None) == 0).all()
        return
    q, cache = torch.ones((3, 4, 16), device=DEVICE), torch.zeros((2, 4, 2, 16), device=DEVICE)
    starts, nothing = (torch.zeros(num, dtype=torch.int32, device=DEVICE) for num in (1, 0))
    assert (attend(q, cache, cache, starts, nothing, nothing.view(0, 1), 0.3, None, 1, 1, TILING) == 0).all()
    assert attend(q[:0], cache, cache, starts, nothing, nothing.view(0, 1), 0.3, None, 1, 1, TILING).shape == (0, 4, 16)


def test_queries_that_are_views_into_a_fused_projection() -> None:
    case = make_case([20, 6], [2, 1], heads=(4, 2), head_dim=16)
    wide = torch.randn((3, 8, 16), generator=torch.Generator().manual_seed(2))
    wide[:, :4] = case.q
    got = run_kernel(replace(case, q=wide[:, :4]), 0.3, None)
    assert_equal_enough(got, reference(case, 0.3, None))


@pytest.mark.parametrize("window", [None, 6])
def test_the_backend_writes_and_attends_without_host_lengths(window: int | None) -> None:
    case = make_case([30, 7, 12, 0], [1, 5, 0, 20], heads=(6, 2), head_dim=16, padded_tokens=1)
    expected = reference(case, 0.3, window)
    backend = make_attention("triton", 6, 2, 16, 0.3, window)
    assert isinstance(backend, TritonAttention)
    assert backend.name == "triton"
    assert not backend.needs_host_lens
    moved = to_device(case)
    plan = backend.plan(moved.metadata)
    for _ in range(2):  # a plan runs every layer
        k_cache, v_cache = moved.k_cache.clone(), moved.v_cache.clone()
        got = plan.run(moved.q, moved.k, moved.v, k_cache, v_cache)
        assert_equal_enough(got, expected)
    untouched = case.k_cache.clone()
    flat, kept = untouched.view(-1, 2, 16), case.metadata.slot_mapping >= 0
    flat[case.metadata.slot_mapping[kept]] = case.k[kept]
    torch.testing.assert_close(k_cache.cpu(), untouched, rtol=0, atol=0, equal_nan=True)


def test_a_plan_reads_its_buffers_when_it_runs() -> None:
    """As a captured graph does: the same plan, after the draft step's buffers have moved on in place."""
    case = to_device(make_case([18, 9], [1, 1], heads=(4, 2), head_dim=16))
    plan = TritonAttention(4, 2, 16, 0.3).plan(case.metadata)
    plan.run(case.q, case.k, case.v, case.k_cache, case.v_cache)
    second = make_case([18, 9], [2, 2], heads=(4, 2), head_dim=16)
    case.metadata.seq_lens.add_(1)
    slots = layout.slots_of(case.metadata.block_tables.cpu().numpy(), np.arange(2), np.array([19, 10]), 4, 10**6)
    case.metadata.slot_mapping.copy_(torch.from_numpy(slots))
    q, k, v = (x[[0, 2]].to(DEVICE) for x in (second.q, second.k, second.v))
    got = plan.run(q, k, v, case.k_cache, case.v_cache)
    for row, length in enumerate((20, 11)):
        where = torch.from_numpy(
            layout.slots_of(case.metadata.block_tables.cpu().numpy(), np.full(length, row), np.arange(length), 4, 99)
        ).to(DEVICE)
        keys = case.k_cache.view(-1, 2, 16)[where].repeat_interleave(2, dim=1)
        values = case.v_cache.view(-1, 2, 16)[where].repeat_interleave(2, dim=1)
        probs = torch.softmax(torch.einsum("hd,khd->hk", q[row], keys) * 0.3, dim=-1)
        assert_equal_enough(got[row], torch.einsum("hk,khd->hd", probs, values))


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device on this machine: nothing to capture a graph on")
def test_a_captured_graph_gives_what_running_gives() -> None:
    """Captured under bounds, replayed on other lengths: the bits of a run outside the graph."""
    bounds = to_device(make_case([60, 60, 60], [2, 2, 2], heads=(6, 2), head_dim=64, dtype=torch.bfloat16))
    static = replace(bounds, metadata=replace(bounds.metadata, max_seq_len=4096))
    plan = TritonAttention(6, 2, 64, 0.125).plan(static.metadata)
    arguments = static.q, static.k, static.v, static.k_cache, static.v_cache
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.run(*arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = plan.run(*arguments)
    for seed, lens in enumerate(([60, 60, 60], [3, 17, 40], [0, 59, 1])):
        case = to_device(make_case(lens, [2, 2, 2], heads=(6, 2), head_dim=64, dtype=torch.bfloat16, seed=seed))
        expected = (
            TritonAttention(6, 2, 64, 0.125)
            .plan(case.metadata)
            .run(case.q, case.k, case.v, case.k_cache.clone(), case.v_cache.clone())
        )
        for name in ("q", "k", "v"):
            getattr(static, name).copy_(getattr(case, name))
        for name in ("k_cache", "v_cache"):
            blocks = getattr(case, name)
            getattr(static, name)[: blocks.shape[0]].copy_(blocks)
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(static.metadata, name).copy_(getattr(case.metadata, name))
        tables = case.metadata.block_tables
        static.metadata.block_tables[:, : tables.shape[1]].copy_(tables)
        graph.replay()
        assert torch.equal(output, expected)


def test_rotating_in_the_same_launch_is_rotating_before() -> None:
    case = to_device(make_case([12, 3], [1, 3], heads=(4, 2), head_dim=16))
    angle = torch.rand((4, 8), generator=torch.Generator().manual_seed(1))
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    plan = TritonAttention(4, 2, 16, 0.3).plan(case.metadata)
    caches = case.k_cache.clone(), case.v_cache.clone()
    got = plan.run_rotating(case.q, case.k, case.v, cos, sin, *caches)
    q, k = plain_rope.apply_rope(case.q, case.k, cos, sin)
    assert_equal_enough(got, plan.run(q, k, case.v, case.k_cache, case.v_cache))


def test_the_tiling_follows_the_device() -> None:
    tiling = choose_tiling(DEVICE, 8, 128, 2)
    assert tiling.many_keys % tiling.block_keys == 0
    assert [tiling.splits_of(rows) for rows in (1, 4, 8, 64)] == [64, 64, 32, 8]
    wide = choose_tiling(DEVICE, 8, 128, 4)
    assert wide.block_keys < tiling.block_keys
