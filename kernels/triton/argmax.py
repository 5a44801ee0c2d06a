"""Which token of each row has the greatest logit? See `reference.argmax`.

A vocabulary is long and rows are few: one program for a row would leave most of a GPU idle. Programs go over stretches
of it instead, and bring what they found together in one number that orders as (logit, first column) does. The greatest
is the same whoever comes when, so a maximum in memory does, and the last program of a row to arrive writes it out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.argmax import make_scratch as make_scratch

# Columns that a program loads at a time.
_BLOCK = 2048
# With more rows than that there are programs enough without cutting a row as small as can be.
_FEW_ROWS = 8
_MOST_TURNS = 4


@triton.jit
def _argmax(
    logits_ptr,
    ids_ptr,
    scratch_ptr,
    out_ptr,
    row_stride,
    vocab: tl.constexpr,
    HAS_IDS: tl.constexpr,
    NUM_STRETCHES: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    best_column = tl.zeros([BLOCK], tl.int32)
    for turn in tl.static_range(TURNS):
        columns = (stretch * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        # Columns past the end lose to every one before it that holds -inf as well.
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        # Floats order as their bits do, negative ones the other way round.
        bits = logits.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = tl.where(order == -1, 0, order)  # -0.0
        order = tl.where(logits != logits, 0x7FFFFFFF, order)
        better = order > best
        best = tl.where(better, order, best)
        best_column = tl.where(better, columns, best_column)
    # Never 0, and greater for the lesser column of equals.
    keys = ((best.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - best_column).to(tl.int64)
    key = tl.max(keys, axis=0)
    is_last = True
    if NUM_STRETCHES > 1:
        key_ptr = scratch_ptr + row * 2
        tl.atomic_max(key_ptr, key, sem="relaxed")
        # The row's key is in before this program says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(key_ptr + 1, 1, sem="acq_rel")
        is_last = arrived == NUM_STRETCHES - 1
        if is_last:
            # Both ready for the next launch.
            key = tl.atomic_xchg(key_ptr, 0)
            tl.store(key_ptr + 1, 0)
    if is_last:
        winner = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        if HAS_IDS:
            winner = tl.load(ids_ptr + winner)
        tl.store(out_ptr + row, winner)


def argmax(logits: torch.Tensor, ids: torch.Tensor | None, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """See `reference.argmax.argmax`. A row of logits is contiguous. ValueError: more rows than the scratch has."""
    rows, vocab = logits.shape
    if rows > scratch.shape[0]:
        raise ValueError(f"logits: {rows} rows, the scratch is for {scratch.shape[0]}")
    if rows == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    turns = min(1 if rows <= _FEW_ROWS else _MOST_TURNS, triton.cdiv(vocab, block))
    stretches = triton.cdiv(vocab, block * turns)
    _argmax[(rows, stretches)](
        logits,
        out if ids is None else ids,
        scratch,
        out,
        logits.stride(0),
        vocab=vocab,
        HAS_IDS=ids is not None,
        NUM_STRETCHES=stretches,
        TURNS=turns,
        BLOCK=block,
        num_warps=4,
    )
