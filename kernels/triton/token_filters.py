"""Which tokens do top-k, top-p and min-p leave, where there are few rows? See `reference.sampling.filter_logits`.

Each filter keeps the tokens down to some distance behind the best one. For top-k and top-p the distance is the smallest
within which there is enough: k tokens, or a share of the mass. It is found over the bit patterns of float32, which for
numbers from 0 on order as the numbers do, four bits a launch: all programs of a row weigh what lies within sixteen
distances, each over a chunk of the vocabulary, and the next launch begins by adding that up, which tells the sixteenth
to look into. No sort, no atomics, nothing waits: the sums are of fixed chunks in a fixed order, so a row's tokens
depend neither on the run nor on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 2048  # vocabulary entries of a program
_PIECE = 512  # of them compared at a time
_PARTS = tl.constexpr(16)
# Bits below those that a launch settles: 31 bits, the sign being 0.
_SHIFTS = (27, 23, 19, 15, 11, 7, 3, 0)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LARGEST_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def behind_best(logits, best, temperature):
    """(best - logits) / temperature, at least 0: 0 for the best itself, also where everything is -inf."""
    return tl.where(logits == best, 0.0, (best - logits) / temperature)


@triton.jit
def _row_best(bests_ptr, row, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    chunks = tl.arange(0, BLOCK_CHUNKS)
    bests = tl.load(bests_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    return tl.max(bests, axis=0)


@triton.jit
def _narrowed(sums_ptr, row, low, shift, wanted, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Where the first of the sixteen parts of 2**shift distances from `low` on begins within which there is enough.
    Infinity where not even everything is, as rounding can have it.
    """
    chunks = tl.arange(0, BLOCK_CHUNKS)[:, None]
    parts = tl.arange(0, _PARTS)
    sums_ptrs = sums_ptr + (row * NUM_CHUNKS + chunks) * _PARTS + parts[None, :]
    sums = tl.sum(tl.load(sums_ptrs, mask=chunks < NUM_CHUNKS, other=0.0), axis=0)
    first = tl.min(tl.where(sums >= wanted, parts, _PARTS), axis=0)
    # What is no number lies beyond infinity.
    return tl.minimum(tl.where(first < _PARTS, low + (first << shift), _INFINITY_BITS), _INFINITY_BITS)


@triton.jit
def _mass_wanted(masses_ptr, limits_ptr, row, top_k, top_p, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """The mass that top-p is to reach: of what top-k has left."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    masses_ptrs = masses_ptr + (row * NUM_CHUNKS + chunks) * 2
    mask = chunks < NUM_CHUNKS
    total = tl.sum(tl.load(masses_ptrs, mask=mask, other=0.0), axis=0)
    limit = tl.load(limits_ptr + row)
    if limit < _INFINITY_BITS:
        # Exactly k tokens share the mass: those that tie with the k-th and are more than k do not count.
        surplus = tl.sum(tl.load(masses_ptrs + 1, mask=mask, other=0.0), axis=0) - top_k.to(tl.float32)
        total -= surplus * tl.exp(-limit.to(tl.float32, bitcast=True))
    return top_p * total


@triton.jit
def _find_best(logits_ptr, bests_ptr, row_stride, vocab: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Each chunk's best logit."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
    tl.store(bests_ptr + row * NUM_CHUNKS + chunk, tl.max(logits, axis=0))


@triton.jit(do_not_specialize=["shift", "shift_before"])
def _weigh_parts(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bests_ptr,
    masses_ptr,
    limits_ptr,
    low_before_ptr,
    low_ptr,
    sums_before_ptr,
    sums_ptr,
    row_stride,
    shift,
    shift_before,
    vocab: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """How much of a chunk lies within each of sixteen distances, 2**shift apart: tokens (COUNTS, for top-k) or mass.

    shift_before: of the launch before, whose sums tell where to begin; -1: there is none.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    runs = temperature > 0
    if COUNTS:
        runs = runs & (top_k > 0) & (top_k < vocab)
    else:
        runs = runs & (top_p < 1)
    if runs:
        low = tl.full([], 0, tl.int32)
        if shift_before >= 0:
            if COUNTS:
                wanted = top_k.to(tl.float32)
            else:
                wanted = _mass_wanted(masses_ptr, limits_ptr, row, top_k, top_p, NUM_CHUNKS, BLOCK_CHUNKS)
            before = tl.load(low_before_ptr + row)
            low = _narrowed(sums_before_ptr, row, before, shift_before, wanted, NUM_CHUNKS, BLOCK_CHUNKS)
        if chunk == 0:
            tl.store(low_ptr + row, low)
        best = _row_best(bests_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        # From infinity on nothing would fit into 32 bits, nor matter.
        begin = tl.minimum(low, _LARGEST_BITS - (((_PARTS - 1) << shift) + ((1 << shift) - 1)))
        limits = begin + (tl.arange(0, _PARTS) << shift) + ((1 << shift) - 1)
        sums = tl.zeros([PIECE, _PARTS], tl.float32)
        for first in tl.static_range(0, CHUNK, PIECE):
            columns = chunk * CHUNK + first + tl.arange(0, PIECE)
            logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
            behind = behind_best(logits, best, temperature)
            if COUNTS:
                weights = tl.where(columns < vocab, 1.0, 0.0)
            else:
                weights = tl.where(columns < vocab, tl.exp(-behind), 0.0)
            inside = behind.to(tl.int32, bitcast=True)[:, None] <= limits[None, :]
            sums += tl.where(inside, weights[:, None], 0.0)
        where = (row * NUM_CHUNKS + chunk) * _PARTS + tl.arange(0, _PARTS)
        tl.store(sums_ptr + where, tl.sum(sums, axis=0))


@triton.jit
def _weigh_all(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bests_ptr,
    masses_ptr,
    limits_ptr,
    low_ptr,
    sums_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top-k's distance, infinity where it is off; for top-p a chunk's mass within it, and how many tokens that is."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    limit = tl.full([], 0, tl.int32) + _INFINITY_BITS
    if (temperature > 0) & (top_k > 0) & (top_k < vocab):
        low = tl.load(low_ptr + row)
        limit = _narrowed(sums_ptr, row, low, 0, top_k.to(tl.float32), NUM_CHUNKS, BLOCK_CHUNKS)
    if chunk == 0:
        tl.store(limits_ptr + row, limit)
    if (temperature > 0) & (tl.load(top_p_ptr + row) < 1):
        best = _row_best(bests_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
        behind = behind_best(logits, best, temperature)
        inside = (behind.to(tl.int32, bitcast=True) <= limit) & (columns < vocab)
        where = (row * NUM_CHUNKS + chunk) * 2
        tl.store(masses_ptr + where, tl.sum(tl.where(inside, tl.exp(-behind), 0.0), axis=0))
        tl.store(masses_ptr + where + 1, tl.sum(inside.to(tl.float32), axis=0))


@triton.jit
def _keep(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bests_ptr,
    masses_ptr,
    limits_ptr,
    low_ptr,
    sums_ptr,
    out_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a chunk, -inf where a token lies behind one of the distances."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    kept = logits
    if temperature > 0:
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        limit = tl.load(limits_ptr + row)
        if top_p < 1:
            top_k = tl.load(top_k_ptr + row)
            wanted = _mass_wanted(masses_ptr, limits_ptr, row, top_k, top_p, NUM_CHUNKS, BLOCK_CHUNKS)
            low = tl.load(low_ptr + row)
            limit = tl.minimum(limit, _narrowed(sums_ptr, row, low, 0, wanted, NUM_CHUNKS, BLOCK_CHUNKS))
        if min_p > 0:
            # Not the maximum with 0, which may be -0: its bits are no order.
            behind_limit = tl.where(min_p < 1, -tl.log(min_p), 0.0)
            limit = tl.minimum(limit, behind_limit.to(tl.int32, bitcast=True))
        best = _row_best(bests_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        behind = behind_best(logits, best, temperature)
        kept = tl.where(behind.to(tl.int32, bitcast=True) <= limit, logits, float("-inf"))
    tl.store(out_ptr + row * vocab + columns, kept, mask=columns < vocab)


def filter_few_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """See `reference.sampling.filter_logits`. A row of logits is contiguous; nothing waits for the host."""
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty((rows, vocab), dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    bests, masses = (torch.empty((rows, num_chunks, n), dtype=torch.float32, device=device) for n in (1, 2))
    # A launch reads what the one before it wrote, while other programs of it already write: two places for each.
    sums = torch.empty((2, rows, num_chunks, _PARTS.value), dtype=torch.float32, device=device)
    # Both of one alignment: kernels are compiled by it.
    lows = torch.empty((2, -(-rows // 4) * 4), dtype=torch.int32, device=device)
    limits = torch.empty(rows, dtype=torch.int32, device=device)
    grid, stride = (rows, num_chunks), logits.stride(0)
    sizes = {"vocab": vocab, "NUM_CHUNKS": num_chunks, "CHUNK": chunk}
    blocks = {"BLOCK_CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": 8}
    row_state = (logits, temperature, top_k, top_p)
    _find_best[grid](logits, bests, stride, **sizes, num_warps=8)
    last = (len(_SHIFTS) - 1) % 2
    for counts in (True, False):
        if not counts:
            _weigh_all[grid](*row_state, bests, masses, limits, lows[last], sums[last], stride, **sizes, **blocks)
        for number, shift in enumerate(_SHIFTS):
            turn = number % 2
            _weigh_parts[grid](
                *row_state,
                *(bests, masses, limits),
                *(lows[1 - turn], lows[turn], sums[1 - turn], sums[turn]),
                stride,
                shift,
                _SHIFTS[number - 1] if number else -1,
                **sizes,
                **blocks,
                PIECE=min(_PIECE, chunk),
                COUNTS=counts,
            )
    _keep[grid](*row_state, min_p, bests, masses, limits, lows[last], sums[last], out, stride, **sizes, **blocks)
    return out
