"""Which tokens do top-k, top-p and min-p leave, where there are many rows? See `token_filters.py` for few.

A program a row: the distance is found by bisection, 31 steps that each count (or weigh) what lies within one and read
the whole row for it. The time hardly depends on the number of rows until they fill the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.token_filters import behind_best

_BLOCK = 8192
_INFINITY_BITS = tl.constexpr(0x7F800000)


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


def filter_many_rows(
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
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    return out
