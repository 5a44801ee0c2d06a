"""How do raw logits become a token? See `reference.sampling`.

Filters: `token_filters.py` and `filter_rows.py`. Draws: the vocabulary is cut in chunks of one fixed size, whatever the
batch, so that a row's token does not depend on the rows beside it; a second launch takes the best of the chunks.
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
from kernels.triton.filter_rows import filter_many_rows
from kernels.triton.philox import gumbel_block, make_noise
from kernels.triton.token_filters import behind_best, filter_few_rows

# Vocabulary entries of one program of a draw.
CHUNK = 4096
# Up to so many rows all of the device on each of them is quicker than a program on each: on an H200 and 128,256 tokens
# 0.07 ms instead of 0.82 for one row, 0.26 instead of 0.83 for 16, 0.91 instead of 0.87 for 64.
FEW_ROWS = 48


def chunk_size(vocab: int) -> int:
    """Entries per chunk: CHUNK, or a small vocabulary whole."""
    return max(4, min(CHUNK, 1 << (vocab - 1).bit_length()))


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


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """See `reference.sampling.filter_logits`. A row of logits is contiguous; nothing waits for the host.

    The two ways add up a row's mass in different orders: a token that decides by a last bit whether top_p is reached
    may be kept by one of them alone.
    """
    filter_rows = filter_few_rows if logits.shape[0] <= FEW_ROWS else filter_many_rows
    return filter_rows(logits, temperature, top_k, top_p, min_p)
