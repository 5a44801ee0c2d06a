"""Paged attention of long rows: chunks of a prompt. The other half of `attention.py`, which says how the two share out.

A tile is some query tokens with all the query heads that share a KV head, so that keys and values are read once for the
group. A tile goes over the keys that all its tokens see without a mask, and over the few at either end with one. Tiles
with the most keys come first: programs are as many as the device holds, each takes every n-th tile, and the short ones
at the end even out what the long ones left uneven.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.overlap import gdc_launch_dependents, gdc_wait


@triton.jit
def _turn(
    q,
    best,
    total,
    mixed,
    blocks,
    begin,
    end_key,
    positions,
    table_ptr,
    k_cache_ptr,
    v_cache_ptr,
    head_offset,
    scale_log2,
    CACHE_BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """One block of keys. blocks: their blocks' ids. FAR: the cache has more elements than 32 bits can count. MASKED:
    some token may not see some of them. Returns the new (best, total, mixed), and the next keys' blocks.
    """
    keys = begin + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    # The blocks' ids are a turn ahead of the keys, whose addresses they are.
    after = keys + BLOCK_KEYS
    next_blocks = tl.load(table_ptr + after // CACHE_BLOCK, mask=after < end_key, other=0)
    if FAR:
        blocks = blocks.to(tl.int64)
    offsets = (blocks * CACHE_BLOCK + keys % CACHE_BLOCK) * TOKEN_STRIDE + head_offset
    offsets = offsets[:, None] + dims[None, :]
    if MASKED:
        # What lies past a row's end in its last block is another request's, or nothing at all: never loaded.
        inside = keys < end_key
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_DIM:
        k = tl.load(k_cache_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_cache_ptr + offsets)
    scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
    if MASKED:
        seen = (keys[None, :] <= positions[:, None]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
    shift = new_best
    if MASKED:
        # A token may see none of these keys: then nothing is subtracted from its -inf.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    fade = tl.exp2(best - shift)
    if MASKED:
        v = tl.load(v_cache_ptr + offsets, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_DIM:
        v = tl.load(v_cache_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        v = tl.load(v_cache_ptr + offsets)
    total = total * fade + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(DOT), v.to(DOT), mixed * fade[:, None], input_precision="ieee")
    return new_best, total, mixed, next_blocks


@triton.jit(do_not_specialize=["num_rows", "scale_log2"])
def attend_long_rows(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    starts_ptr,
    seq_lens_ptr,
    tables_ptr,
    out_ptr,
    scale_log2,
    q_stride,
    table_stride,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_SHORT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    FAR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of more than MAX_SHORT tokens; others are left alone."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    DOT: tl.constexpr = tl.float32 if WIDE else q_ptr.dtype.element_ty
    TILE_TOKENS: tl.constexpr = TILE // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    rows = tl.arange(0, BLOCK_ROWS)
    row_starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
    query_lens = tl.load(starts_ptr + rows + 1, mask=rows < num_rows, other=0) - row_starts
    seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    query_lens = tl.where((query_lens > MAX_SHORT) & (seq_lens > 0), query_lens, 0)
    tiles = (query_lens + TILE_TOKENS - 1) // TILE_TOKENS
    tile_ends = tl.cumsum(tiles, axis=0)
    num_tiles = tl.sum(tiles, axis=0)

    tile = tl.arange(0, TILE)
    tile_tokens = tile // GROUP
    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_DIM
    for item in range(tl.program_id(0), num_tiles * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        work = num_tiles - 1 - item // NUM_KV_HEADS
        row = tl.sum((tile_ends <= work).to(tl.int32), axis=0)
        part = work - tl.sum(tl.where(rows < row, tiles, 0), axis=0)
        start = tl.load(starts_ptr + row)
        query_len = tl.load(starts_ptr + row + 1) - start
        seq_len = tl.load(seq_lens_ptr + row)
        first_token = part * TILE_TOKENS
        context_len = seq_len - query_len
        end_key = context_len + tl.minimum(first_token + TILE_TOKENS, query_len)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(context_len + first_token - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        # All tokens see the keys from open_key to shut_key.
        shut_key = first_key + (context_len + first_token + 1 - first_key) // BLOCK_KEYS * BLOCK_KEYS
        open_key = first_key
        if WINDOW > 0:
            hidden = tl.maximum(end_key - WINDOW - first_key, 0)
            open_key = tl.minimum(first_key + tl.cdiv(hidden, BLOCK_KEYS) * BLOCK_KEYS, shut_key)

        tokens = first_token + tile_tokens
        heads = kv_head * GROUP + tile % GROUP
        valid = (tile_tokens < TILE_TOKENS) & (tokens < query_len)
        positions = context_len + tokens
        q_offsets = (start + tokens).to(tl.int64) * q_stride + heads * HEAD_DIM
        q_mask = valid[:, None] & dim_mask[None, :]
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0).to(DOT)
        head_offset = kv_head * HEAD_DIM
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, BLOCK_DIM], tl.float32)
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        blocks = tl.load(table_ptr + keys // CACHE_BLOCK, mask=keys < end_key, other=0)
        if WINDOW > 0:
            for begin in tl.range(first_key, open_key, BLOCK_KEYS, num_stages=STAGES):
                best, total, mixed, blocks = _turn(
                    q, best, total, mixed, blocks, begin, end_key, positions, table_ptr, k_cache_ptr, v_cache_ptr,
                    head_offset, scale_log2, CACHE_BLOCK, TOKEN_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, WINDOW, FAR,
                    True, DOT,
                )  # fmt: skip
        for begin in tl.range(open_key, shut_key, BLOCK_KEYS, num_stages=STAGES):
            best, total, mixed, blocks = _turn(
                q, best, total, mixed, blocks, begin, end_key, positions, table_ptr, k_cache_ptr, v_cache_ptr,
                head_offset, scale_log2, CACHE_BLOCK, TOKEN_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, WINDOW, FAR,
                False, DOT,
            )  # fmt: skip
        for begin in tl.range(shut_key, end_key, BLOCK_KEYS, num_stages=1):
            best, total, mixed, blocks = _turn(
                q, best, total, mixed, blocks, begin, end_key, positions, table_ptr, k_cache_ptr, v_cache_ptr,
                head_offset, scale_log2, CACHE_BLOCK, TOKEN_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, WINDOW, FAR,
                True, DOT,
            )  # fmt: skip
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = (start + tokens).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM
        tl.store(out_ptr + out_offsets[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=q_mask)
