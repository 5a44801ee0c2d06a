"""How do raw logits become a token? See `reference.sampling`.

Filters: each of top-k, top-p and min-p keeps the tokens down to some value. For the first two that value is found by
bisection over the bit patterns of float32, 31 steps that each count (or weigh) what lies above: no sort, no atomics, no
scratch, the same answer in every run. Draws: the vocabulary is cut in chunks of one fixed size, whatever the batch, so
that a row's token does not depend on the rows beside it; a second launch takes the best of the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.sampling import SamplingTensors as SamplingTensors
from kernels.reference.sampling import apply_bias as apply_bias
from kernels.reference.sampling import apply_penalties as apply_penalties
from kernels.reference.sampling import counts_with_drafts as counts_with_drafts
from kernels.reference.sampling import scale_logits as scale_logits
from kernels.triton.philox import gumbel_block, make_noise

# Vocabulary entries of one program of a draw.
CHUNK = 4096
_FILTER_BLOCK = 8192
_INFINITY_BITS = tl.constexpr(0x7F800000)


def chunk_size(vocab: int) -> int:
    """Entries per chunk: CHUNK, or a small vocabulary whole."""
    return max(4, min(CHUNK, 1 << (vocab - 1).bit_length()))


@triton.jit
def behind_best(logits, best, temperature):
    """(best - logits) / temperature, at least 0: 0 for the best itself, also where everything is -inf."""
    return tl.where(logits == best, 0.0, (best - logits) / temperature)


@triton.jit
def draw_from_chunk(logits, columns, temperature, seed, position, stream, first_counter, CHUNK: tl.constexpr):
    """(best logit, best score relative to it, its token) of a chunk: at temperature 0 the best logit's own.

    logits: float32 [CHUNK], -inf past the vocabulary. A score is logit / temperature + Gumbel noise.
    """
    best, index = tl.max(logits, axis=0, return_indices=True)
    score = tl.full([], 0.0, tl.float32)
    if temperature > 0:
        noise = gumbel_block(seed, position, stream, first_counter, CHUNK // 4)
        # A chunk in which everything is excluded gives a score as well: `best_of_chunks` sees that its best is -inf.
        scores = noise - behind_best(logits, best, temperature)
        score, index = tl.max(scores, axis=0, return_indices=True)
    return best, score, index.to(tl.int32) + tl.min(columns, axis=0)


@triton.jit
def best_of_chunks(bests_ptr, scores_ptr, tokens_ptr, temperature, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the best score among a row's chunks, the first one of equals. Pointers to the row's chunks."""
    chunks = tl.arange(0, BLOCK)
    mask = chunks < NUM_CHUNKS
    bests = tl.load(bests_ptr + chunks, mask=mask, other=float("-inf"))
    scores = tl.load(scores_ptr + chunks, mask=mask, other=float("-inf"))
    best = tl.max(bests, axis=0)
    scores -= behind_best(bests, best, tl.where(temperature > 0, temperature, 1.0))
    winner = tl.argmax(tl.where(mask, scores, float("-inf")), axis=0)
    return tl.load(tokens_ptr + winner)


@triton.jit(do_not_specialize=["stream"])
def _draw(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    bests_ptr,
    scores_ptr,
    tokens_ptr,
    stream,
    row_stride,
    vocab: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
    best, score, token = draw_from_chunk(
        logits.to(tl.float32),
        columns,
        tl.load(temperature_ptr + row),
        tl.load(seeds_ptr + row),
        tl.load(positions_ptr + row),
        tl.full([], 0, tl.int32) + stream,
        chunk * (CHUNK // 4),
        CHUNK,
    )
    where = row * NUM_CHUNKS + chunk
    tl.store(bests_ptr + where, best)
    tl.store(scores_ptr + where, score)
    tl.store(tokens_ptr + where, token)


@triton.jit
def _pick(
    temperature_ptr,
    bests_ptr,
    scores_ptr,
    tokens_ptr,
    out_ptr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * NUM_CHUNKS
    temperature = tl.load(temperature_ptr + row)
    token = best_of_chunks(bests_ptr + first, scores_ptr + first, tokens_ptr + first, temperature, NUM_CHUNKS, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """See `reference.sampling.gumbel_noise`. seeds, positions: contiguous."""
    return make_noise(seeds, positions, stream, num, "gumbel")


def gumbel_sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """See `reference.sampling.gumbel_sample`. A row of logits is contiguous; of equal logits the first one wins."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    chunk = chunk_size(vocab)
    num_chunks = triton.cdiv(vocab, chunk)
    bests, scores = torch.empty((2, rows, num_chunks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device)
    _draw[(rows, num_chunks)](
        logits,
        temperature,
        seeds,
        positions,
        bests,
        scores,
        winners,
        stream,
        logits.stride(0),
        vocab=vocab,
        NUM_CHUNKS=num_chunks,
        CHUNK=chunk,
        num_warps=8,
    )
    _pick[(rows,)](
        temperature,
        bests,
        scores,
        winners,
        tokens,
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return tokens


@triton.jit
def _weight_above(row_ptr, limit, best, temperature, COUNT: tl.constexpr, vocab: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens (COUNT), or how much of exp(-behind), lie at most `limit` (bits of a float32) behind the best."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        behind = behind_best(logits, best, temperature)
        inside = (behind.to(tl.int32, bitcast=True) <= limit) & (columns < vocab)
        if COUNT:
            total += tl.where(inside, 1.0, 0.0)
        else:
            total += tl.where(inside, tl.exp(-behind), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _bisect(row_ptr, wanted, best, temperature, COUNT: tl.constexpr, vocab: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest distance behind the best within which there is at least `wanted` (see `_weight_above`), as bits.

    Non-negative floats order as their bit patterns do. Infinity where not even everything is enough.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + _INFINITY_BITS
    while low < high:
        middle = low + (high - low) // 2
        enough = _weight_above(row_ptr, middle, best, temperature, COUNT, vocab, BLOCK) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _filter(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    row_stride,
    vocab: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limit = tl.full([], 0, tl.int32) + _INFINITY_BITS
    best = tl.full([], 0.0, tl.float32)
    if temperature > 0:
        bests = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            bests = tl.maximum(bests, tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf")))
        best = tl.max(bests, axis=0)
        limits_k = (top_k > 0) & (top_k < vocab)
        if limits_k:
            limit = _bisect(row_ptr, top_k.to(tl.float32), best, temperature, True, vocab, BLOCK)
        if top_p < 1:
            total = _weight_above(row_ptr, limit, best, temperature, False, vocab, BLOCK)
            if limits_k:
                # Exactly k tokens share the mass: those that tie with the k-th and are more than k do not count.
                surplus = _weight_above(row_ptr, limit, best, temperature, True, vocab, BLOCK) - top_k.to(tl.float32)
                total -= surplus * tl.exp(-limit.to(tl.float32, bitcast=True))
            inside = _bisect(row_ptr, top_p * total, best, temperature, False, vocab, BLOCK)
            limit = tl.minimum(limit, inside)
        if min_p > 0:
            # Not the maximum with 0, which may be -0: its bits are no order.
            behind_limit = tl.where(min_p < 1, -tl.log(min_p), 0.0)
            limit = tl.minimum(limit, behind_limit.to(tl.int32, bitcast=True))
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        kept = logits
        if temperature > 0:
            behind = behind_best(logits, best, temperature)
            kept = tl.where(behind.to(tl.int32, bitcast=True) <= limit, logits, float("-inf"))
        tl.store(out_ptr + row * vocab + columns, kept, mask=columns < vocab)


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """See `reference.sampling.filter_logits`. A row of logits is contiguous; nothing waits for the host."""
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    _filter[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        out,
        logits.stride(0),
        vocab=vocab,
        BLOCK=min(_FILTER_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    return out
