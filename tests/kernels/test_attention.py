"""Paged attention: the reference against dense attention, and the torch backend against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import layout
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention
from kernels.attention.torch_backend import TorchAttention
from kernels.reference.attention import paged_attention
from kernels.reference.kv_write import write_kv
from tests.kernels.steps import tensor

HEADS = [(1, 1), (4, 2), (6, 2), (9, 3)]


@dataclass(frozen=True, slots=True)
class Case:
    """A step with a cache: what the rows hold already is written, everything else is NaN."""

    metadata: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keys: list[torch.Tensor]  # per row, [seq_len, Hkv, D]: its context, then this step's
    values: list[torch.Tensor]


def make_case(
    context_lens: list[int],
    query_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    block_size: int = 4,
    contiguous: bool = False,
    padded_tokens: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Rows of `context_lens` + `query_lens`; the tables are runs of blocks, or shuffled. Extra tokens are padding."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    context, query = np.array(context_lens, np.int32), np.array(query_lens, np.int32)
    seq_lens = np.where(query > 0, context + query, 0).astype(np.int32)
    width = max(1, layout.blocks_needed(int(seq_lens.max()), block_size))
    num_blocks = len(query) * width + 1
    ids = np.arange(1, num_blocks, dtype=np.int32)
    if not contiguous:
        ids = np.random.default_rng(seed).permutation(ids)
    tables = ids.reshape(len(query), width).astype(np.int32)
    starts = layout.make_query_start_loc(query)
    positions = layout.make_positions(context, query)
    tokens = int(starts[-1])
    slots = layout.make_slot_mapping(tables, positions, starts, block_size, 10**6, tokens + padded_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(cache_shape, math.nan, dtype=dtype), torch.full(cache_shape, math.nan, dtype=dtype)
    total = tokens + padded_tokens
    q = random(total, num_heads, head_dim)
    k, v = random(total, num_kv_heads, head_dim), random(total, num_kv_heads, head_dim)
    keys, values = [], []
    for row, length in enumerate(context_lens):
        old_k, old_v = random(length, num_kv_heads, head_dim), random(length, num_kv_heads, head_dim)
        if query_lens[row]:
            where = layout.slots_of(tables, np.full(length, row), np.arange(length), block_size, 10**6)
            write_kv(old_k, old_v, tensor(where), k_cache, v_cache)
        own = slice(int(starts[row]), int(starts[row + 1]))
        keys.append(torch.cat((old_k, k[own])))
        values.append(torch.cat((old_v, v[own])))
    # Columns past a row's last block hold ids that no cache has: they are never to be read.
    for row, length in enumerate(seq_lens.tolist()):
        tables[row, layout.blocks_needed(length, block_size) :] = 2**31 - 1
    metadata = AttentionMetadata(
        query_start_loc=tensor(starts),
        seq_lens=tensor(seq_lens),
        block_tables=tensor(tables),
        slot_mapping=tensor(slots),
        max_query_len=int(query.max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_np=starts,
        seq_lens_np=seq_lens,
    )
    return Case(metadata, q, k, v, k_cache, v_cache, keys, values)


def dense(case: Case, scale: float, window: int | None) -> torch.Tensor:
    """Every row by itself through scaled_dot_product_attention, with an explicit mask. Tokens of no row: zeros."""
    out = torch.zeros_like(case.q)
    starts = case.metadata.query_start_loc.tolist()
    group = case.q.shape[1] // case.k.shape[1]
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        own = slice(starts[row], starts[row + 1])
        length, queries = keys.shape[0], starts[row + 1] - starts[row]
        if queries == 0:
            continue
        behind = torch.arange(length - queries, length)[:, None] - torch.arange(length)[None, :]
        mask = (behind >= 0) & (behind < (window or length))
        out[own] = torch.nn.functional.scaled_dot_product_attention(
            case.q[own].transpose(0, 1),
            keys.repeat_interleave(group, dim=1).transpose(0, 1),
            values.repeat_interleave(group, dim=1).transpose(0, 1),
            attn_mask=mask,
            scale=scale,
        ).transpose(0, 1)
    return out


def reference(case: Case, scale: float, window: int | None) -> torch.Tensor:
    metadata = case.metadata
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    write_kv(case.k, case.v, metadata.slot_mapping, k_cache, v_cache)
    return paged_attention(
        case.q,
        k_cache,
        v_cache,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_tables,
        scale,
        window,
    )


def backend(case: Case, scale: float, window: int | None) -> torch.Tensor:
    attention = TorchAttention(case.q.shape[1], case.k.shape[1], case.q.shape[2], scale, window)
    return attention.plan(case.metadata).run(case.q, case.k, case.v, case.k_cache.clone(), case.v_cache.clone())


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(
    ROWS,
    st.sampled_from(HEADS),
    st.sampled_from([1, 3, 4, 16]),
    st.booleans(),
    st.sampled_from([None, 1, 3, 8, 100]),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_any_mix_of_rows(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    contiguous: bool,
    window: int | None,
    padding: int,
    seed: int,
) -> None:
    context_lens, query_lens = [list(column) for column in zip(*rows, strict=True)]
    case = make_case(
        context_lens,
        query_lens,
        heads=heads,
        block_size=block_size,
        contiguous=contiguous,
        padded_tokens=padding,
        seed=seed,
    )
    expected = dense(case, 0.3, window)
    torch.testing.assert_close(reference(case, 0.3, window), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(backend(case, 0.3, window), expected, rtol=2e-5, atol=2e-6)


MIXES = {
    "one decode row": ([70], [1]),
    "one verify row": ([70], [5]),
    "decode rows of equal length": ([64] * 8, [1] * 8),
    "decode rows of mixed lengths": ([3, 70, 12, 130, 0, 64, 1, 33], [1] * 8),
    "verify rows": ([3, 70, 12, 130], [5, 4, 5, 1]),
    "a chunk beside decode rows": ([3, 100, 40, 0], [1, 64, 1, 33]),
    "long chunk over long context": ([200], [150]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("window", [None, 16])
def test_the_mixes_a_service_runs(mix: str, contiguous: bool, window: int | None) -> None:
    context_lens, query_lens = MIXES[mix]
    case = make_case(
        context_lens, query_lens, heads=(9, 3), head_dim=64, block_size=16, contiguous=contiguous, padded_tokens=2
    )
    expected = dense(case, 0.125, window)
    torch.testing.assert_close(reference(case, 0.125, window), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(backend(case, 0.125, window), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mix", MIXES)
def test_half_precision(mix: str, dtype: torch.dtype) -> None:
    context_lens, query_lens = MIXES[mix]
    case = make_case(context_lens, query_lens, heads=(4, 2), head_dim=16, block_size=16, dtype=dtype)
    expected = reference(case, 0.25, None)
    got = backend(case, 0.25, None)
    assert got.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_padded_rows_and_rows_that_do_not_run_get_zeros() -> None:
    """A draft step has one query token per row; a padded row's has seq_len 0 and slot PAD."""
    case = make_case([5, 9, 6], [1, 1, 1], padded_tokens=2)
    seq_lens = np.array([6, 0, 7], np.int32)
    slots = case.metadata.slot_mapping.clone()
    slots[1] = layout.PAD_SLOT
    padded = replace(case.metadata, seq_lens=tensor(seq_lens), seq_lens_np=seq_lens, slot_mapping=slots)
    got = backend(replace(case, metadata=padded), 0.3, None)
    expected = dense(case, 0.3, None)
    assert (got[1] == 0).all()
    assert (got[3:] == 0).all()
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]], rtol=2e-5, atol=2e-6)


def test_a_step_with_nothing_to_run() -> None:
    case = make_case([4, 3], [0, 0], padded_tokens=3)
    assert (backend(case, 0.3, None) == 0).all()


def test_run_writes_the_steps_kv_and_nothing_else() -> None:
    case = make_case([5, 0, 9], [3, 2, 1], padded_tokens=1)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TorchAttention(4, 2, 8, 0.3, None).plan(case.metadata).run(case.q, case.k, case.v, k_cache, v_cache)
    expected_k, expected_v = case.k_cache.clone(), case.v_cache.clone()
    write_kv(case.k, case.v, case.metadata.slot_mapping, expected_k, expected_v)
    torch.testing.assert_close(k_cache, expected_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, expected_v, rtol=0, atol=0, equal_nan=True)


def test_one_plan_runs_every_layer() -> None:
    case = make_case([30, 7, 12], [1, 1, 4])
    plan = TorchAttention(4, 2, 8, 0.3, None).plan(case.metadata)
    first = plan.run(case.q, case.k, case.v, case.k_cache.clone(), case.v_cache.clone())
    kept = first.clone()
    other = plan.run(case.q * 2, case.k, case.v + 1, case.k_cache.clone(), case.v_cache.clone() + 1)
    assert torch.equal(first, kept)  # an output is the caller's, no later layer writes into it
    again = plan.run(case.q, case.k, case.v, case.k_cache.clone(), case.v_cache.clone())
    assert torch.equal(first, again)
    torch.testing.assert_close(other, backend(replace(case, q=case.q * 2), 0.3, None) + 1, rtol=2e-5, atol=2e-6)


def test_a_row_alone_and_in_a_crowd() -> None:
    """Not to the last bit (shapes choose the order of sums), but as near as fp32 gets."""
    case = make_case([30, 7, 12, 90], [1, 1, 1, 1], head_dim=64)
    crowd = backend(case, 0.125, None)
    for row in range(4):
        metadata = case.metadata
        alone = replace(
            metadata,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            query_start_loc_np=np.array([0, 1], np.int32),
            seq_lens=metadata.seq_lens[row : row + 1],
            seq_lens_np=metadata.seq_lens.numpy()[row : row + 1],
            block_tables=metadata.block_tables[row : row + 1],
            slot_mapping=metadata.slot_mapping[row : row + 1],
        )
        one = slice(row, row + 1)
        got = backend(replace(case, metadata=alone, q=case.q[one], k=case.k[one], v=case.v[one]), 0.125, None)
        torch.testing.assert_close(got, crowd[one], rtol=2e-5, atol=2e-6)


def test_refuses_metadata_without_host_lengths() -> None:
    case = make_case([4], [1])
    with pytest.raises(ValueError, match="query_start_loc_np"):
        TorchAttention(4, 2, 8, 0.3, None).plan(replace(case.metadata, query_start_loc_np=None))
    with pytest.raises(ValueError, match="seq_lens_np"):
        TorchAttention(4, 2, 8, 0.3, None).plan(replace(case.metadata, seq_lens_np=None))


def test_backends_by_name() -> None:
    chosen = make_attention("torch", 4, 2, 8, 0.3, 16)
    assert chosen.name == "torch"
    assert chosen.needs_host_lens
    with pytest.raises(ValueError, match="'nothing'"):
        make_attention("nothing", 4, 2, 8, 0.3, None)
