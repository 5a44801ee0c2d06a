"""Which drafts does the target accept, and which token of its own does it add? See `reference.verify`.

Whether logit row j accepts its draft, and what it would put in its place, does not depend on the rows before it: all
rows are decided at once, over chunks of the vocabulary (`sampling.py` says why their size is fixed), and a last launch
walks each request to its first refusal. Rows that weigh a draft's probability against the target's take one launch
more, once the target's own sum is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.verify import Verdict as Verdict
from kernels.triton.philox import ACCEPT, RESIDUAL, TARGET, gumbel_block, uniform_block
from kernels.triton.sampling import best_of_chunks, chunk_size, draw_from_chunk
from kernels.triton.token_filters import behind_best

_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_TARGET = tl.constexpr(TARGET)


@triton.jit
def _draft_of(drafts_ptr, row, column, length, drafts_stride, WIDTH: tl.constexpr):
    """The draft that logit row `column` of a request decides on, -1 where there is none."""
    present = (column < WIDTH) & (column + 1 < length)
    return tl.load(drafts_ptr + row * drafts_stride + column, mask=present, other=-1)


@triton.jit
def _weighs(match_only_ptr, has_probs_ptr, row, temperature, WITH_PROBS: tl.constexpr, WITH_HAS: tl.constexpr):
    """Whether a request's drafts are weighed by their probability."""
    weighs = (temperature > 0) & False
    if WITH_PROBS:
        weighs = (temperature > 0) & (tl.load(match_only_ptr + row) == 0)
        if WITH_HAS:
            weighs = weighs & (tl.load(has_probs_ptr + row) != 0)
    return weighs


@triton.jit(do_not_specialize=["drafts_stride"])
def _scan(
    logits_ptr,
    starts_ptr,
    drafts_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    match_only_ptr,
    has_probs_ptr,
    bests_ptr,
    scores_ptr,
    tokens_ptr,
    row_stride,
    drafts_stride,
    vocab: tl.constexpr,
    WIDTH: tl.constexpr,
    GREEDY: tl.constexpr,
    WITH_PROBS: tl.constexpr,
    WITH_HAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of a logit row: its draw, or for a row that weighs, in the score's place, the sum of its weights."""
    row = (tl.program_id(0) // (WIDTH + 1)).to(tl.int64)
    column = tl.program_id(0) % (WIDTH + 1)
    chunk = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    if column < length:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        row_ptr = logits_ptr + (start + column).to(tl.int64) * row_stride
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        where = tl.program_id(0).to(tl.int64) * NUM_CHUNKS + chunk
        if GREEDY:
            best, index = tl.max(logits, axis=0, return_indices=True)
            tl.store(bests_ptr + where, best)
            tl.store(scores_ptr + where, 0.0)
            tl.store(tokens_ptr + where, chunk * CHUNK + index.to(tl.int32))
        else:
            temperature = tl.load(temperature_ptr + row)
            draft = _draft_of(drafts_ptr, row, column, length, drafts_stride, WIDTH)
            weighs = _weighs(match_only_ptr, has_probs_ptr, row, temperature, WITH_PROBS, WITH_HAS)
            if weighs & (draft >= 0):
                best = tl.max(logits, axis=0)
                weights = tl.exp(-behind_best(logits, best, temperature))
                weights = tl.where(logits == float("-inf"), 0.0, weights)
                tl.store(bests_ptr + where, best)
                tl.store(scores_ptr + where, tl.sum(weights, axis=0))
            else:
                best, score, token = draw_from_chunk(
                    logits,
                    columns,
                    temperature,
                    tl.load(seeds_ptr + row),
                    tl.load(positions_ptr + row) + column,
                    tl.full([], 0, tl.int32) + _TARGET,
                    chunk * (CHUNK // 4),
                    CHUNK,
                )
                tl.store(bests_ptr + where, best)
                tl.store(scores_ptr + where, score)
                tl.store(tokens_ptr + where, token)


@triton.jit
def _best_and_sum(bests_ptr, sums_ptr, temperature, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's best logit, and the sum of exp((logit - best) / temperature) over all its chunks."""
    chunks = tl.arange(0, BLOCK)
    mask = chunks < NUM_CHUNKS
    bests = tl.load(bests_ptr + chunks, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + chunks, mask=mask, other=0.0)
    best = tl.max(bests, axis=0)
    return best, tl.sum(sums * tl.exp(-behind_best(bests, best, temperature)), axis=0)


@triton.jit(do_not_specialize=["drafts_stride"])
def _weigh(
    logits_ptr,
    starts_ptr,
    drafts_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    match_only_ptr,
    has_probs_ptr,
    probs_ptr,
    bests_ptr,
    scores_ptr,
    residuals_ptr,
    residual_tokens_ptr,
    row_stride,
    drafts_stride,
    probs_row_stride,
    probs_stride,
    vocab: tl.constexpr,
    WIDTH: tl.constexpr,
    WITH_HAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of a row that weighs: the best replacement for its draft, from the positive part of target - draft, and
    behind it the best one from the target, for when nothing at all is positive.
    """
    row = (tl.program_id(0) // (WIDTH + 1)).to(tl.int64)
    column = tl.program_id(0) % (WIDTH + 1)
    chunk = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    if column < length:
        temperature = tl.load(temperature_ptr + row)
        draft = _draft_of(drafts_ptr, row, column, length, drafts_stride, WIDTH)
        if _weighs(match_only_ptr, has_probs_ptr, row, temperature, True, WITH_HAS) & (draft >= 0):
            first = tl.program_id(0).to(tl.int64) * NUM_CHUNKS
            best, total = _best_and_sum(bests_ptr + first, scores_ptr + first, temperature, NUM_CHUNKS, BLOCK_CHUNKS)
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = columns < vocab
            row_ptr = logits_ptr + (start + column).to(tl.int64) * row_stride
            logits = tl.load(row_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
            probs_row = probs_ptr + row * probs_row_stride + column * probs_stride
            draft_probs = tl.load(probs_row + columns, mask=mask, other=0.0)
            target = tl.exp(-behind_best(logits, best, temperature)) / total
            target = tl.where(logits == float("-inf"), 0.0, target)
            noise = gumbel_block(
                tl.load(seeds_ptr + row),
                tl.load(positions_ptr + row) + column,
                tl.full([], 0, tl.int32) + _RESIDUAL,
                chunk * (CHUNK // 4),
                CHUNK // 4,
            )
            residual = tl.maximum(target - draft_probs, 0.0)
            scores = tl.where(residual > 0, tl.log(tl.where(residual > 0, residual, 1.0)) + noise, float("-inf"))
            score, index = tl.max(scores, axis=0, return_indices=True)
            where = 2 * first + chunk
            tl.store(residuals_ptr + where, score)
            tl.store(residual_tokens_ptr + where, chunk * CHUNK + index.to(tl.int32))
            scores = tl.where(target > 0, tl.log(tl.where(target > 0, target, 1.0)) + noise, float("-inf"))
            score, index = tl.max(scores, axis=0, return_indices=True)
            tl.store(residuals_ptr + where + NUM_CHUNKS, score)
            tl.store(residual_tokens_ptr + where + NUM_CHUNKS, chunk * CHUNK + index.to(tl.int32))


@triton.jit
def _replacement(residuals_ptr, tokens_ptr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The token that replaces a refused draft. Pointers to the row's residual chunks, the target's behind them."""
    chunks = tl.arange(0, BLOCK)
    mask = chunks < NUM_CHUNKS
    scores = tl.load(residuals_ptr + chunks, mask=mask, other=float("-inf"))
    fallback = tl.load(residuals_ptr + NUM_CHUNKS + chunks, mask=mask, other=float("-inf"))
    # Rounding can leave nothing when the two distributions are equal: the target itself is then the right one.
    empty = tl.max(scores, axis=0) == float("-inf")
    winner = tl.argmax(tl.where(empty, fallback, scores), axis=0)
    return tl.load(tokens_ptr + tl.where(empty, NUM_CHUNKS, 0) + winner)


@triton.jit(do_not_specialize=["drafts_stride"])
def _walk(
    logits_ptr,
    starts_ptr,
    drafts_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    match_only_ptr,
    has_probs_ptr,
    probs_ptr,
    bests_ptr,
    scores_ptr,
    tokens_ptr,
    residuals_ptr,
    residual_tokens_ptr,
    out_tokens_ptr,
    out_sampled_ptr,
    out_accepted_ptr,
    row_stride,
    drafts_stride,
    probs_row_stride,
    probs_stride,
    WIDTH: tl.constexpr,
    GREEDY: tl.constexpr,
    WITH_PROBS: tl.constexpr,
    WITH_HAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One request: accept drafts up to the first refusal."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    temperature = tl.full([], 0.0, tl.float32)
    weighs = temperature > 0
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        weighs = _weighs(match_only_ptr, has_probs_ptr, row, temperature, WITH_PROBS, WITH_HAS)
    num_accepted = tl.full([], 0, tl.int32)
    alive = length > 0
    for column in range(WIDTH + 1):
        token = tl.full([], -1, tl.int64)
        accepted = tl.full([], 0, tl.int32)
        if alive:
            first = (row * (WIDTH + 1) + column) * NUM_CHUNKS
            draft = _draft_of(drafts_ptr, row, column, length, drafts_stride, WIDTH)
            if WITH_PROBS:
                if weighs & (draft >= 0):
                    best, total = _best_and_sum(
                        bests_ptr + first, scores_ptr + first, temperature, NUM_CHUNKS, BLOCK_CHUNKS
                    )
                    logit = tl.load(logits_ptr + (start + column).to(tl.int64) * row_stride + draft).to(tl.float32)
                    target = tl.exp(-behind_best(logit, best, temperature)) / total
                    draft_prob = tl.load(probs_ptr + row * probs_row_stride + column * probs_stride + draft)
                    position = tl.load(positions_ptr + row) + column
                    noise = uniform_block(tl.load(seeds_ptr + row), position, tl.full([], 0, tl.int32) + _ACCEPT, 0, 1)
                    noise = tl.sum(tl.where(tl.arange(0, 4) == 0, noise, 0.0), axis=0)
                    # noise < target / draft without the division.
                    accepted = (noise * draft_prob < target).to(tl.int32)
                    replacement = _replacement(
                        residuals_ptr + 2 * first, residual_tokens_ptr + 2 * first, NUM_CHUNKS, BLOCK_CHUNKS
                    )
                    token = tl.where(accepted > 0, draft, replacement.to(tl.int64))
                else:
                    token = best_of_chunks(
                        bests_ptr + first, scores_ptr + first, tokens_ptr + first, temperature, NUM_CHUNKS, BLOCK_CHUNKS
                    ).to(tl.int64)
                    accepted = (token == draft).to(tl.int32)
            else:
                token = best_of_chunks(
                    bests_ptr + first, scores_ptr + first, tokens_ptr + first, temperature, NUM_CHUNKS, BLOCK_CHUNKS
                ).to(tl.int64)
                accepted = (token == draft).to(tl.int32)
        tl.store(out_tokens_ptr + row * (WIDTH + 1) + column, token)
        num_accepted += accepted
        alive = accepted > 0
    tl.store(out_accepted_ptr + row, num_accepted)
    tl.store(out_sampled_ptr + row, tl.where(length > 0, num_accepted + 1, 0))


def verify_greedy(logits: torch.Tensor, cu_logits: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    """See `reference.verify.verify_greedy`. A row of logits is contiguous; of equal logits the first one wins."""
    return _launch(logits, cu_logits, draft_tokens, None, None, None, None, None, None)


def verify(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    start_positions: torch.Tensor,
    match_only: torch.Tensor,
    draft_probs: torch.Tensor | None,
    has_probs: torch.Tensor | None,
) -> Verdict:
    """See `reference.verify.verify`. Last dimensions are contiguous; nothing waits for the host."""
    return _launch(
        logits, cu_logits, draft_tokens, temperatures, seeds, start_positions, match_only, draft_probs, has_probs
    )


def _launch(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    start_positions: torch.Tensor | None,
    match_only: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    has_probs: torch.Tensor | None,
) -> Verdict:
    """`verify`, or `verify_greedy` where there are no temperatures (nothing but logits and drafts is read then)."""
    num_rows, width = draft_tokens.shape
    device, vocab = draft_tokens.device, logits.shape[1]
    verdict = Verdict(
        torch.empty((num_rows, width + 1), dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if num_rows == 0:
        return verdict
    chunk = chunk_size(vocab)
    num_chunks = triton.cdiv(vocab, chunk)
    logit_rows = num_rows * (width + 1)
    bests, scores = torch.empty((2, logit_rows, num_chunks), dtype=torch.float32, device=device)
    winners = torch.empty((logit_rows, num_chunks), dtype=torch.int32, device=device)
    with_probs = draft_probs is not None
    # Where nothing weighs, the replacements' buffers stand for themselves: they are not read.
    residuals, residual_winners = scores, winners
    if with_probs:
        residuals = torch.empty((logit_rows, 2, num_chunks), dtype=torch.float32, device=device)
        residual_winners = torch.empty((logit_rows, 2, num_chunks), dtype=torch.int32, device=device)
    probs = logits if draft_probs is None else draft_probs
    probs_strides = (0, 0) if draft_probs is None else (draft_probs.stride(0), draft_probs.stride(1))
    inputs = (
        logits,
        cu_logits,
        draft_tokens,
        *(bests if temperatures is None else temperatures, cu_logits if seeds is None else seeds),
        *(cu_logits if start_positions is None else start_positions, cu_logits if match_only is None else match_only),
        cu_logits if has_probs is None else has_probs,
    )
    kinds = {"WITH_PROBS": with_probs, "WITH_HAS": has_probs is not None}
    _scan[(logit_rows, num_chunks)](
        *inputs,
        bests,
        scores,
        winners,
        logits.stride(0),
        draft_tokens.stride(0),
        vocab=vocab,
        WIDTH=width,
        GREEDY=temperatures is None,
        **kinds,
        NUM_CHUNKS=num_chunks,
        CHUNK=chunk,
        num_warps=8,
    )
    if with_probs:
        _weigh[(logit_rows, num_chunks)](
            *inputs,
            probs,
            bests,
            scores,
            residuals,
            residual_winners,
            logits.stride(0),
            draft_tokens.stride(0),
            *probs_strides,
            vocab=vocab,
            WIDTH=width,
            WITH_HAS=has_probs is not None,
            NUM_CHUNKS=num_chunks,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            CHUNK=chunk,
            num_warps=8,
        )
    _walk[(num_rows,)](
        *inputs,
        probs,
        bests,
        scores,
        winners,
        residuals,
        residual_winners,
        verdict.tokens,
        verdict.num_sampled,
        verdict.num_accepted,
        logits.stride(0),
        draft_tokens.stride(0),
        *probs_strides,
        WIDTH=width,
        GREEDY=temperatures is None,
        **kinds,
        NUM_CHUNKS=num_chunks,
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return verdict
