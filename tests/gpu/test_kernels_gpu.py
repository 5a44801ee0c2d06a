"""Every Triton kernel on a GPU, in float32 and bfloat16, against its reference in float64 or float32.

Sizes are odd, outputs are poisoned, lengths are read on the device under bounds that are far too loose. `-k small`
picks a subset that ends soon under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from engine.graphs import GraphCache
from kernels import layout
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention
from kernels.kernel_set import KernelSet, kernel_set
from kernels.reference.argmax import make_scratch
from kernels.reference.attention import paged_attention
from kernels.reference.verify import Verdict

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
]

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
# Of `near`.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module")
def triton() -> KernelSet:
    return kernel_set("triton")


@pytest.fixture(scope="module")
def plain() -> KernelSet:
    return kernel_set("reference")


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated inside without being written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal values of `dtype`, seeded by the shape."""
    generator = torch.Generator(DEVICE).manual_seed(sum((index + 3) * size for index, size in enumerate(shape)))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The error's norm within `tolerance` of the result's, and no value off by 30 times that share of the largest."""
    assert got.shape == expected.shape
    wide, exact = got.double(), expected.double()
    assert bool(wide.isfinite().all())
    assert float((wide - exact).norm()) <= tolerance * float(exact.norm())
    assert float((wide - exact).abs().max()) <= 30 * tolerance * float(exact.abs().max())


def same(got: object, expected: object) -> None:
    """Equal, element for element."""
    if isinstance(got, Verdict):
        assert isinstance(expected, Verdict)
        for name in ("tokens", "num_sampled", "num_accepted"):
            same(getattr(got, name), getattr(expected, name))
    else:
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


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
    for tiling in (SkinnyTiling(64, block_in // 2, 1), SkinnyTiling(16, block_in, 3)):
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


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def clones(*values: Any) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def junk(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, 987_654_321, dtype=dtype, device=DEVICE)


# Rows: a chunk of 140 tokens, nothing, a verify row, a decode row, another verify row at the length limit.
STARTS = (0, 140, 140, 145, 146, 151)
LENS = (140, 0, 5, 1, 5)
CONTEXT = (300, 0, 9, 16, 4091)


def metadata_calls(kernels: KernelSet) -> list[torch.Tensor]:
    """Everything that the metadata kernels write, from the same inputs."""
    rows, tokens, width, limit = len(LENS), STARTS[-1], 257, 4094
    starts, seats = ints(*STARTS), ints(3, -1, 0, 2, 1)
    generator = torch.Generator().manual_seed(5)
    tables = (torch.randperm(rows * width, generator=generator).view(rows, width) + 1).to(DEVICE, torch.int32)
    positions = torch.from_numpy(layout.make_positions(np.array(CONTEXT), np.array(LENS))).to(DEVICE)
    ids = torch.arange(tokens, device=DEVICE) + 50
    slots = junk(tokens + 7)
    kernels.compute_slot_mapping(positions, starts, tables, 16, limit, slots)

    shifted, last = junk(tokens + 7), junk(rows, dtype=torch.int32)
    following, anchors = longs(33, -1, -1, -1, -1), longs(-1, -1, 91, 92, 93)
    kernels.prepare_prefill_inputs(ids, starts, ints(0, 0, 2, 0, 4), anchors, following, shifted, last)

    step_positions, step_lens, step_slots = longs(6, 0, 4092, 15, 2), ints(7, 0, 4093, 16, 3), longs(5, -1, 3, 2, 1)
    for active in (None, torch.tensor([True, True, True, False, True], device=DEVICE), None):
        kernels.advance_draft_step(step_positions, step_lens, step_slots, tables, 16, limit, active)

    context_lens, seat_anchors = ints(9, 4091, 16, 300), longs(70, 71, 72, 73)
    drafts = longs(*range(1, 21)).view(rows, 4) - 2
    is_prompt = torch.tensor([True, False, False, False, False], device=DEVICE)
    input_ids, input_positions = junk(tokens + 7), junk(tokens + 7)
    kernels.prepare_target_inputs(
        context_lens, seat_anchors, seats, ids, starts, drafts, starts, is_prompt, input_ids, input_positions
    )
    kernels.commit_verdict(
        context_lens, seat_anchors, seats, ints(*LENS), ints(0, 0, 2, 0, 4), ints(0, 0, 3, 1, 1), anchors
    )

    groups, padded_rows = 2, rows + 3
    out_starts, out_lens = junk(padded_rows + 1, dtype=torch.int32), junk(groups, padded_rows, dtype=torch.int32)
    out_tables, out_slots = junk(groups, padded_rows, width, dtype=torch.int32), junk(groups, tokens + 7)
    seq_lens = ints(*(context + length for context, length in zip(CONTEXT, LENS, strict=True)))
    kernels.fill_metadata(
        *(seats, starts, seq_lens, positions, torch.stack((tables, tables + 7)), [16, 32], limit),
        *(out_starts, out_lens, out_tables, out_slots),
    )
    state = [step_positions, step_lens, step_slots, context_lens, seat_anchors]
    return [slots, shifted, last, *state, input_ids, input_positions, out_starts, out_lens, out_tables, out_slots]


def test_small_metadata(triton: KernelSet, plain: KernelSet) -> None:
    for got, expected in zip(metadata_calls(triton), metadata_calls(plain), strict=True):
        same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(2, 5003), (9, 9001), (1, 128256), (64, 128256), (5, 49152)],
    ids=["small", "small in turns", "llama", "many rows", "smollm2"],
)
def test_argmax(triton: KernelSet, plain: KernelSet, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 equals are many. Often, for the programs of a row meet in another order each time; then in graphs."""
    logits = random(rows, vocab + 8, dtype=dtype)[:, :vocab]
    logits[0, vocab // 2 :] = torch.nan
    if rows > 1:
        logits[-1] = -torch.inf
    ids = torch.randperm(vocab, device=DEVICE)
    scratch, host = make_scratch(rows, DEVICE), torch.empty(rows, dtype=torch.int64)
    plain.argmax(logits.cpu(), None, scratch, host)
    columns, chosen, graphs = junk(rows), junk(rows), GraphCache(DEVICE)
    for replayed in (False, True):
        for _ in range(20):
            columns.fill_(-7)
            chosen.fill_(-7)
            if replayed:
                graphs.run("columns", lambda: triton.argmax(logits, None, scratch, columns))
                graphs.run("ids", lambda: triton.argmax(logits, ids, scratch, chosen))
            else:
                triton.argmax(logits, None, scratch, columns)
                triton.argmax(logits, ids, scratch, chosen)
            same(columns.cpu(), host)
            same(chosen.cpu(), ids.cpu()[host])
    assert not scratch.any()


@pytest.mark.parametrize("vocab", [997, 49152, 128256], ids=["small", "smollm2", "llama"])
def test_noise_and_sampling(triton: KernelSet, plain: KernelSet, vocab: int) -> None:
    rows = torch.arange(7, device=DEVICE)
    seeds, positions = rows * 77 - 300, rows << 33
    logits = random(7, vocab, scale=3.0)
    logits[4, : vocab // 2] = -torch.inf
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0, 1.0, 2.0, 1e-3], device=DEVICE)
    same(triton.uniform(seeds, positions, 1, 1003), plain.uniform(seeds, positions, 1, 1003))
    near(triton.gumbel_noise(seeds, positions, 2, vocab), plain.gumbel_noise(seeds, positions, 2, vocab), 2e-6)
    with poisoned():
        drawn = triton.gumbel_sample(logits, temperature, seeds, positions, 3)
    same(drawn, plain.gumbel_sample(logits, temperature, seeds, positions, 3))
    top_k, one = ints(50, 0, 7, 1, 0, 300, 3), torch.ones(7, device=DEVICE)
    top_p, min_p = one * 0.93, torch.tensor([0, 0.05, 0, 0, 0, 0.001, 0], device=DEVICE)
    with poisoned():
        got = triton.filter_logits(logits, temperature, top_k, top_p, min_p)
    expected = plain.filter_logits(logits, temperature, top_k, top_p, min_p)
    # Sums in another order may end a token sooner or later, no more.
    assert int(((got > -torch.inf) != (expected > -torch.inf)).sum(dim=1).max()) <= 2
    kept = got > -torch.inf
    same(got[kept], logits[kept])


@pytest.mark.parametrize(("vocab", "width"), [(70, 3), (49152, 4), (128256, 3)], ids=["small", "smollm2", "llama"])
def test_verification(triton: KernelSet, plain: KernelSet, vocab: int, width: int) -> None:
    """Greedy, match and weighed rows, ragged and empty."""
    lens = [width + 1, 1, 0, width, width + 1, width + 1]
    starts = ints(0, *np.cumsum(lens).tolist())
    generator = torch.Generator().manual_seed(vocab)
    drafts = torch.randint(-1, 6, (len(lens), width), generator=generator).to(DEVICE)
    logits = random(sum(lens), vocab)
    for row, length in enumerate(lens):
        for column in range(min(length, width)):
            draft = int(drafts[row, column])
            if draft >= 0 and (row + column) % 4:
                logits[int(starts[row]) + column, draft] += 12
    probs = torch.softmax(random(len(lens), width, vocab, scale=2.0), dim=-1)
    rows = torch.arange(len(lens), device=DEVICE)
    temperature = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 1.0], device=DEVICE)
    match_only = torch.tensor([False, True, False, False, False, True], device=DEVICE)
    has_probs = torch.tensor([True, True, True, True, False, True], device=DEVICE)
    with poisoned():
        same(triton.verify_greedy(logits, starts, drafts), plain.verify_greedy(logits, starts, drafts))
    arguments = (logits, starts, drafts, temperature, rows * 17 - 40, rows + (40 << 31), match_only)
    for given, has in ((None, None), (probs, None), (probs, has_probs)):
        with poisoned():
            got = triton.verify(*arguments, given, has)
        same(got, plain.verify(*arguments, given, has))
