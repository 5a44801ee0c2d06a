"""Into which stretches are the keys of short rows split, and how are they mixed again? See `attention.py`.

Both launches work it out from the lengths on the device, the one that reads the keys and the one that merges what came
of them, by the same arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.overlap import gdc_launch_dependents, gdc_wait


@triton.jit
def _first_key(seq_lens, query_lens, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The first key to look at for query tokens that end at seq_lens, rounded down to a block."""
    first = seq_lens * 0
    if WINDOW > 0:
        first = tl.maximum(seq_lens - query_lens - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    return first


@triton.jit
def _stretch(num_keys, NUM_KV_HEADS: tl.constexpr, programs, few_keys, many_keys):
    """About how many keys a stretch has, for rows that look at num_keys keys each (0: does not run).

    Few rows: so many that all stretches run at once. Many: three to a program, so that rows of different lengths even
    out, but not so short that starting on one takes as long as reading it.
    """
    total = tl.sum(num_keys, axis=0)
    num_rows = tl.sum((num_keys > 0).to(tl.int32), axis=0)
    at_once = programs // NUM_KV_HEADS
    few = tl.maximum(tl.cdiv(total, tl.maximum(at_once - num_rows, 1)), few_keys)
    many = tl.maximum(tl.cdiv(total, tl.maximum(3 * at_once, 1)), many_keys)
    return tl.where(2 * num_rows <= at_once, few, many)


@triton.jit
def _split_len(num_keys, stretch, max_splits, BLOCK_KEYS: tl.constexpr):
    """Keys per stretch of a row that looks at num_keys keys: its stretches are as even as blocks allow."""
    parts = tl.cdiv(num_keys, tl.maximum(stretch, tl.cdiv(num_keys, max_splits)))
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, tl.maximum(parts, 1)), BLOCK_KEYS) * BLOCK_KEYS, BLOCK_KEYS)


@triton.jit(do_not_specialize=["num_rows", "programs", "few_keys", "many_keys", "max_splits"])
def _merge(
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    num_rows,
    programs,
    few_keys,
    many_keys,
    max_splits,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_SHORT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of a token's heads: zeros where it is of no row that runs, the stretches' mix where its row has several."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rows = tl.arange(0, BLOCK_ROWS)
    starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
    ends = tl.load(starts_ptr + rows + 1, mask=rows < num_rows, other=2147483647)
    lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    row = tl.sum((ends <= token).to(tl.int32), axis=0)
    query_lens = tl.where(rows < num_rows, ends - starts, 0)
    query_len = tl.sum(tl.where(rows == row, query_lens, 0), axis=0)
    seq_len = tl.sum(tl.where(rows == row, lens, 0), axis=0)
    row_start = tl.sum(tl.where(rows == row, starts, 0), axis=0)
    dims = tl.arange(0, BLOCK_DIM)
    out_mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    out_ptrs = out_ptr + (token.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    short = (query_lens > 0) & (query_lens <= MAX_SHORT) & (lens > 0)
    all_keys = tl.where(short, lens - _first_key(lens, query_lens, WINDOW, BLOCK_KEYS), 0)
    stretch = _stretch(all_keys, NUM_KV_HEADS, programs, few_keys, many_keys)
    if OVERLAP:
        gdc_wait()
    if seq_len <= 0:
        zeros = tl.zeros([HEADS, BLOCK_DIM], tl.float32)
        tl.store(out_ptrs, zeros.to(out_ptr.dtype.element_ty), mask=out_mask)
    elif query_len <= MAX_SHORT:
        num_keys = seq_len - _first_key(seq_len, query_len, WINDOW, BLOCK_KEYS)
        split_len = _split_len(num_keys, stretch, max_splits, BLOCK_KEYS)
        if num_keys > split_len:
            before = tl.where((rows < row) & short, query_lens, 0)
            scratch = (tl.sum(before, axis=0) + token - row_start).to(tl.int64)
            firsts = (scratch * NUM_HEADS + heads)[:, None] * max_splits
            splits = tl.arange(0, BLOCK_SPLITS)
            mask = (heads < NUM_HEADS)[:, None] & (splits * split_len < num_keys)[None, :]
            stats_ptrs = stats_ptr + (firsts + splits[None, :]) * 2
            mixed = tl.zeros([HEADS, BLOCK_DIM], tl.float32)
            if BLOCK_PARTS == BLOCK_SPLITS:
                # All at once: on their way together with the stats.
                parts_ptrs = partial_ptr + (firsts + splits[None, :])[:, :, None] * HEAD_DIM + dims[None, None, :]
                parts_mask = mask[:, :, None] & (dims < HEAD_DIM)[None, None, :]
                parts = tl.load(parts_ptrs, mask=parts_mask, other=0.0)
            bests = tl.load(stats_ptrs, mask=mask, other=float("-inf"))
            totals = tl.load(stats_ptrs + 1, mask=mask, other=0.0)
            best = tl.max(bests, axis=1)
            shift = tl.where(best == float("-inf"), 0.0, best)[:, None]
            shares = tl.exp2(bests - shift)
            total = tl.sum(totals * shares, axis=1)
            if BLOCK_PARTS == BLOCK_SPLITS:
                mixed = tl.sum(parts * shares[:, :, None], axis=1)
            else:
                # As many stretches at a time as registers hold.
                for first in range(0, BLOCK_SPLITS, BLOCK_PARTS):
                    some = first + tl.arange(0, BLOCK_PARTS)
                    some_mask = (heads < NUM_HEADS)[:, None] & (some * split_len < num_keys)[None, :]
                    where = firsts + some[None, :]
                    some_ptrs = partial_ptr + where[:, :, None] * HEAD_DIM + dims[None, None, :]
                    some_parts_mask = some_mask[:, :, None] & (dims < HEAD_DIM)[None, None, :]
                    some_parts = tl.load(some_ptrs, mask=some_parts_mask, other=0.0)
                    weights = tl.exp2(tl.load(stats_ptr + where * 2, mask=some_mask, other=float("-inf")) - shift)
                    mixed += tl.sum(some_parts * weights[:, :, None], axis=1)
            mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=out_mask)
