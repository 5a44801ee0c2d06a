"""The Triton kernels of a layer on a GPU, in float32 and bfloat16, against their references in float64 or float32.

Sizes are odd, outputs are poisoned, lengths are read on the device under bounds that are far too loose. `-k small`
picks a subset that ends soon under compute-sanitizer.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kernels import layout
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention
from kernels.kernel_set import KernelSet
from kernels.reference.attention import paged_attention
from tests.gpu.comparing import DEVICE, DTYPES, TOLERANCE, near, poisoned, random, same

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (5, 4096), (3, 8191)], ids=["small", "llama", "odd"])
def test_norms(triton: KernelSet, plain: KernelSet, tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(tokens, size, dtype=dtype), random(tokens + 1, size, dtype=dtype), random(size)
    residual, weight = residual[1:], weight.to(dtype)
    with poisoned():
        normed = triton.rms_norm(x, weight, 1e-5)
        added, total = triton.rms_norm_residual(x, residual, weight, 1e-5)
    near(normed, plain.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])
    same(total, x + residual)
    near(added, plain.rms_norm(x + residual, weight, 1e-5), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (5, 14336), (7, 1001)], ids=["small", "llama", "odd"])
def test_silu_mul(triton: KernelSet, tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * size, dtype=dtype, scale=2)
    with poisoned():
        got = triton.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    near(got, torch.nn.functional.silu(gate) * up, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(2, 9, 3, 64), (5, 32, 8, 128), (3, 5, 1, 80)],
    ids=["small", "llama", "odd"],
)
def test_rotation_and_kv_write(
    triton: KernelSet, plain: KernelSet, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Out of a fused projection, into scattered slots, one of them PAD; nothing else of the cache is touched."""
    fused = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.arange(tokens, device=DEVICE) * 30011
    inv_freq = 10000.0 ** -torch.linspace(0, 0.98, head_dim // 2, device=DEVICE)
    with poisoned():
        cos, sin = triton.rotary_angles(positions, inv_freq, 1.0, dtype)
    angles = positions[:, None].float() * inv_freq
    near(cos, angles.double().cos(), TOLERANCE[dtype])
    near(sin, angles.double().sin(), TOLERANCE[dtype])
    slots = torch.tensor([7, -1, 0, 11, 5, 9, 3][:tokens], device=DEVICE)
    caches = torch.full((6, 3, 4, kv_heads, head_dim), 77.0, dtype=dtype, device=DEVICE)
    with poisoned():
        rotated, rotated_k = triton.apply_rope(q, k, cos, sin)
        triton.write_kv(rotated_k, v, slots, caches[0], caches[1])
        fused_q = triton.rope_kv_write(q, k, v, cos, sin, slots, caches[2], caches[3])
    expected = plain.rope_kv_write(q, k, v, cos, sin, slots, caches[4], caches[5])
    near(rotated, expected, TOLERANCE[dtype])
    same(fused_q, rotated)
    same(caches[2:4], caches[:2])
    near(caches[2], caches[4], TOLERANCE[dtype])
    same(caches[3], caches[5])


# Products in float32 take seconds each to compile: where they add something.
@pytest.mark.parametrize(
    ("rows", "outs", "ins", "dtype"),
    [
        (1, 96, 576, torch.float32),
        (1, 96, 576, torch.bfloat16),
        (5, 6144, 4096, torch.bfloat16),
        (4, 576, 1536, torch.bfloat16),
        (33, 1030, 520, torch.bfloat16),
        (64, 4096, 14336, torch.bfloat16),
    ],
    ids=["small float32", "small", "llama", "smollm2", "odd", "most"],
)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_of_few_rows(rows: int, outs: int, ins: int, gated: bool, dtype: torch.dtype) -> None:
    """One program for a tile's inputs and several; twice, because the second launch meets the first one's counters."""
    from kernels.triton.linear import SkinnyTiling, num_counters, skinny_linear

    x, weight, bias = random(rows, ins, dtype=dtype), random(outs, ins, dtype=dtype, scale=ins**-0.5), random(outs)
    exact = x.double() @ weight.double().t() + bias.to(dtype).double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate) * up
    block_in = 32 if dtype == torch.float32 else 128
    tilings = (
        SkinnyTiling(64, block_in // 2, 1),
        SkinnyTiling(16, block_in, 3),
        SkinnyTiling(64, block_in, 2, trigger=2, ahead=512),
        SkinnyTiling(128, block_in // 2, 1, num_warps=8, trigger=0, ahead=256),
    )
    for tiling in tilings:
        counters = torch.zeros(num_counters(outs, gated, tiling), dtype=torch.int32, device=DEVICE)
        results = []
        for _ in range(2):
            with poisoned():
                results.append(skinny_linear(x, weight, bias.to(dtype), tiling, counters, gated))
        near(results[0], exact, max(4e-6, TOLERANCE[dtype]))
        same(results[1], results[0])
        assert not counters.any()


# name: (context_lens, query_lens, heads, KV heads, head_dim, cache block, window)
ATTENTION: dict[str, tuple[list[int], list[int], int, int, int, int, int | None]] = {
    "small decode": ([70, 0, 3], [1, 1, 1], 9, 3, 64, 16, None),
    "small verify, padded rows": ([45, 0, 9, 0], [5, 0, 5, 0], 4, 1, 128, 16, None),
    "small prompt": ([0, 33], [65, 1], 4, 2, 64, 16, None),
    "decode, one long row": ([9001], [1], 32, 8, 128, 16, None),
    "verify, 20 rows": ([13 * row + 900 for row in range(20)], [4] * 20, 32, 8, 128, 16, None),
    "decode, smollm2": ([1000 + row for row in range(7)], [1] * 7, 9, 3, 64, 16, None),
    "prompt behind a context": ([1500, 77], [700, 2], 32, 8, 128, 16, None),
    "prompt, smollm2": ([0, 5, 0], [301, 1, 64], 9, 3, 64, 16, None),
    "window": ([3000, 10, 0], [1, 5, 800], 8, 2, 128, 16, 250),
    "a head of 80, a group of 7": ([300, 0], [3, 100], 7, 1, 80, 32, None),
}


def attention_case(name: str, dtype: torch.dtype) -> tuple[AttentionMetadata, dict[str, torch.Tensor], int | None]:
    """Metadata without host lengths and with loose bounds, and the tensors; NaN wherever nothing may be read."""
    context, query, heads, kv_heads, head_dim, block_size, window = ATTENTION[name]
    context_lens, query_lens = np.array(context, np.int32), np.array(query, np.int32)
    seq_lens = np.where(query_lens > 0, context_lens + query_lens, 0).astype(np.int32)
    width = layout.blocks_needed(int(seq_lens.max()), block_size)
    num_blocks = len(query) * width + 1
    tables = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(len(query), width).astype(np.int32)
    starts = layout.make_query_start_loc(query_lens)
    positions = layout.make_positions(context_lens, query_lens)
    tokens = int(starts[-1]) + 3  # padded ones behind
    slots = layout.make_slot_mapping(tables, positions, starts, block_size, 1 << 20, tokens)
    tensors = {
        "q": random(tokens, heads, head_dim, dtype=dtype),
        "k": random(tokens, kv_heads, head_dim, dtype=dtype),
        "v": random(tokens, kv_heads, head_dim, dtype=dtype, scale=0.7),
        "k_cache": torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE),
        "v_cache": torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE),
    }
    for row, length in enumerate(context_lens.tolist()):
        if query[row]:
            where = torch.from_numpy(
                layout.slots_of(tables, np.full(length, row), np.arange(length), block_size, 1 << 20)
            ).to(DEVICE)
            for cache in ("k_cache", "v_cache"):
                flat = tensors[cache].view(-1, kv_heads, head_dim)
                flat[where] = random(length, kv_heads, head_dim, dtype=dtype)

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(DEVICE)

    # A table as services have it, with the columns of the longest sequence; those past a row's end are no blocks.
    wide = np.full((len(query), 8192), 2**31 - 1, np.int32)
    wide[:, :width] = tables
    return (
        AttentionMetadata(there(starts), there(seq_lens), there(wide), there(slots), max(query), 8192 * block_size),
        tensors,
        window,
    )


IN_FLOAT32 = [name for name in ATTENTION if name.startswith("small") or name in ("window", "prompt, smollm2")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in ATTENTION), *((name, torch.float32) for name in IN_FLOAT32)],
)
def test_attention(name: str, dtype: torch.dtype) -> None:
    metadata, tensors, window = attention_case(name, dtype)
    _, _, heads, kv_heads, head_dim, _, _ = ATTENTION[name]
    shape = (heads, kv_heads, head_dim, head_dim**-0.5, window)
    k_cache, v_cache = tensors["k_cache"].clone(), tensors["v_cache"].clone()
    make_attention("reference", *shape).plan(metadata).run(**{**tensors, "k_cache": k_cache, "v_cache": v_cache})
    expected = paged_attention(
        *(tensors["q"].float(), k_cache.float(), v_cache.float(), metadata.query_start_loc, metadata.seq_lens),
        *(metadata.block_tables, head_dim**-0.5, window),
    )
    with poisoned():
        got = make_attention("triton", *shape).plan(metadata).run(**tensors)
    assert got.dtype == dtype
    near(got, expected, {torch.float32: 4e-6, torch.bfloat16: 6e-3}[dtype])
    real = int(metadata.query_start_loc[-1])
    assert not got[real:].any()
    same(tensors["k_cache"].nan_to_num(), k_cache.nan_to_num())
    same(tensors["v_cache"].nan_to_num(), v_cache.nan_to_num())


def test_a_bound_however_loose_changes_no_bit() -> None:
    """How keys are split is decided by the lengths, on the device."""
    metadata, tensors, _ = attention_case("verify, 20 rows", torch.bfloat16)
    backend = make_attention("triton", 32, 8, 128, 128**-0.5, None)
    loose = backend.plan(metadata).run(**tensors)
    tight = int(metadata.seq_lens.max())
    same(backend.plan(replace(metadata, max_seq_len=tight)).run(**tensors), loose)
