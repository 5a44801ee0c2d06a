"""Paged attention with all lengths read on the device. See `reference.attention`.

Two kinds of rows, two launches of one kernel:

    short rows, up to 16 query tokens (decode, verify): all query heads that share a KV head, of all of a row's tokens,
        are folded into one tile, which goes over the row's keys once. The keys are split in stretches that programs
        take side by side, so that one row alone can fill a GPU; a second launch merges the stretches.
    long rows (prompt chunks): tiles of query tokens, each over all the keys it sees (`prompt_attention.py`). Launched
        only where the step may have such rows.

How many stretches a row has depends on the lengths of the batch, which are read on the device, and never on a host's
bound: the result is the same, bit for bit, however loose the bounds are, inside a graph and outside. Programs are as
many as the device can hold; each makes the list of work from the lengths and takes every n-th item of it, so there is
no launch of programs with nothing to do.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.triton.attention_splits import _first_key, _merge, _split_len, _stretch
from kernels.triton.attention_tiling import Tiling as Tiling
from kernels.triton.attention_tiling import choose_tiling as choose_tiling
from kernels.triton.kv_write import packed_heads
from kernels.triton.overlap import gdc_launch_dependents, gdc_wait, overlap_options
from kernels.triton.prompt_attention import attend_long_rows

# Rows of up to this many query tokens are short.
SHORT_LEN = 16


@triton.jit(
    do_not_specialize=[
        *("num_rows", "scale_log2"),
        *("programs", "few_keys", "many_keys", "max_splits"),
    ]
)
def _attend(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    starts_ptr,
    seq_lens_ptr,
    tables_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    q_stride,
    table_stride,
    num_rows,
    programs,
    few_keys,
    many_keys,
    max_splits,
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
    WIDE: tl.constexpr,
    FAR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """FAR: the cache has more elements than 32 bits can count."""
    if OVERLAP:
        gdc_launch_dependents()
    DOT: tl.constexpr = tl.float32 if WIDE else q_ptr.dtype.element_ty
    TILE_TOKENS: tl.constexpr = TILE // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    # The list of work: how many parts (stretches of keys, or tiles of tokens) each row has.
    rows = tl.arange(0, BLOCK_ROWS)
    row_starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
    query_lens = tl.load(starts_ptr + rows + 1, mask=rows < num_rows, other=0) - row_starts
    seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    query_lens = tl.where((query_lens <= MAX_SHORT) & (seq_lens > 0), query_lens, 0)
    num_keys = seq_lens - _first_key(seq_lens, query_lens, WINDOW, BLOCK_KEYS)
    num_keys = tl.where(query_lens > 0, num_keys, 0)
    stretch = _stretch(num_keys, NUM_KV_HEADS, programs, few_keys, many_keys)
    split_lens = _split_len(num_keys, stretch, max_splits, BLOCK_KEYS)
    parts = (num_keys + split_lens - 1) // split_lens
    parts = tl.where(query_lens > 0, parts, 0)
    part_ends = tl.cumsum(parts, axis=0)
    num_items = tl.sum(parts, axis=0) * NUM_KV_HEADS

    tile = tl.arange(0, TILE)
    tile_tokens = tile // GROUP
    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_DIM
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        work = item // NUM_KV_HEADS
        row = tl.sum((part_ends <= work).to(tl.int32), axis=0)
        part = work - tl.sum(tl.where(rows < row, parts, 0), axis=0)
        start = tl.sum(tl.where(rows == row, row_starts, 0), axis=0)
        query_len = tl.sum(tl.where(rows == row, query_lens, 0), axis=0)
        seq_len = tl.sum(tl.where(rows == row, seq_lens, 0), axis=0)
        row_first = _first_key(seq_len, query_len, WINDOW, BLOCK_KEYS)
        split_len = _split_len(seq_len - row_first, stretch, max_splits, BLOCK_KEYS)
        first_key = row_first + part * split_len
        end_key = tl.minimum(first_key + split_len, seq_len)
        one_part = seq_len - row_first <= split_len
        tokens = tile_tokens
        heads = kv_head * GROUP + tile % GROUP
        valid = (tokens < TILE_TOKENS) & (tokens < query_len)
        positions = seq_len - query_len + tokens
        q_offsets = (start + tokens).to(tl.int64) * q_stride + heads * HEAD_DIM
        q_mask = valid[:, None] & dim_mask[None, :]
        # The blocks' ids are a turn ahead of the keys, whose addresses they are.
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        next_blocks = tl.load(table_ptr + keys // CACHE_BLOCK, mask=keys < end_key, other=0)
        if OVERLAP:
            # What a step's metadata says was there before; queries, keys and values are being written.
            gdc_wait()
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0).to(DOT)

        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, BLOCK_DIM], tl.float32)
        for begin in range(first_key, end_key, BLOCK_KEYS):
            keys = begin + tl.arange(0, BLOCK_KEYS)
            blocks = next_blocks
            after = keys + BLOCK_KEYS
            next_blocks = tl.load(table_ptr + after // CACHE_BLOCK, mask=after < end_key, other=0)
            if FAR:
                blocks = blocks.to(tl.int64)
            offsets = (blocks * CACHE_BLOCK + keys % CACHE_BLOCK) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
            offsets = offsets[:, None] + dims[None, :]
            # What lies past a row's end in its last block is another request's, or nothing at all: never loaded.
            kv_mask = (keys < end_key)[:, None] & dim_mask[None, :]
            k = tl.load(k_cache_ptr + offsets, mask=kv_mask, other=0.0).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            seen = (keys[None, :] <= positions[:, None]) & (keys < end_key)[None, :]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            # A token may see none of these keys: then nothing is subtracted from its -inf.
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(best - shift)
            v = tl.load(v_cache_ptr + offsets, mask=kv_mask, other=0.0).to(DOT)
            total = total * fade + tl.sum(weights, axis=1)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
            best = new_best

        if one_part:
            result = mixed / tl.where(total > 0, total, 1.0)[:, None]
            out_offsets = (start + tokens).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM
            out_offsets = out_offsets[:, None] + dims[None, :]
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            # Short rows' tokens lie side by side in the scratch, whatever rows lie between them in the batch.
            scratch = tl.sum(tl.where(rows < row, query_lens, 0), axis=0) + tokens
            where = (scratch.to(tl.int64) * NUM_HEADS + heads) * max_splits + part
            tl.store(partial_ptr + where[:, None] * HEAD_DIM + dims[None, :], mixed, mask=q_mask)
            tl.store(stats_ptr + where * 2, best, mask=valid)
            tl.store(stats_ptr + where * 2 + 1, total, mask=valid)
    if OVERLAP:
        gdc_wait()  # also where there was nothing to do


# Under the interpreter there are no dot products but float32's.
_INTERPRETED = not isinstance(_attend, triton.JITFunction)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_seq_len: int,
    tiling: Tiling,
) -> torch.Tensor:
    """`paged_attention` with the host's upper bounds of the rows' lengths, which size the launch and the scratch.

    q may be a view into a fused projection; caches contiguous; block_tables: rows may be strided. Bounds that are too
    low read and write out of bounds.
    """
    q = packed_heads(q)
    num_tokens, num_heads, head_dim = q.shape
    cache_block, num_kv_heads = k_cache.shape[1:3]
    num_rows = seq_lens.shape[0]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if num_rows == 0:
        return out.zero_()
    group = num_heads // num_kv_heads
    short_len = min(SHORT_LEN, max(1, max_query_len))
    max_splits = max(1, min(tiling.splits_of(num_rows), triton.cdiv(max_seq_len, tiling.few_keys)))
    block_dim = max(16, triton.next_power_of_2(head_dim))
    # Few sizes, so that few forms are compiled while serving.
    row_bits = (num_rows - 1).bit_length()
    block_rows = max(16, 1 << (row_bits + row_bits % 2))
    scratch_rows = min(num_tokens, num_rows * short_len) * num_heads * max_splits
    partial = torch.empty(scratch_rows * head_dim if max_splits > 1 else 1, dtype=torch.float32, device=q.device)
    stats = torch.empty(scratch_rows * 2 if max_splits > 1 else 1, dtype=torch.float32, device=q.device)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "WINDOW": window or 0,
        "MAX_SHORT": SHORT_LEN,
        "BLOCK_ROWS": block_rows,
    }
    short_tile = max(16, triton.next_power_of_2(triton.next_power_of_2(short_len) * group))
    wide = _INTERPRETED or q.dtype == torch.float32
    overlap = overlap_options(q.device)
    # Larger tiles leave a multiprocessor room for two programs where it has it for three.
    small = short_tile * head_dim <= 16 * 128
    programs = tiling.num_programs if small else max(1, tiling.num_programs * 2 // 3)
    registers = {"maxnreg": tiling.registers} if small and not wide else {}
    splitting = (programs, tiling.few_keys, tiling.many_keys, max_splits)
    layer = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "CACHE_BLOCK": cache_block,
        "FAR": k_cache.numel() >= 2**31,
    }
    inputs = (q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, out)
    sizes = (scale * math.log2(math.e), q.stride(0), block_tables.stride(0), num_rows)
    _attend[(min(programs, num_rows * max_splits * num_kv_heads),)](
        *inputs,
        partial,
        stats,
        *sizes,
        *splitting,
        **layer,
        **shared,
        BLOCK_KEYS=tiling.block_keys,
        TILE=short_tile,
        WIDE=wide,
        # Float32's products take the registers of twice the threads.
        num_warps=8 if short_tile > 64 or (wide and short_tile > 16) else 4,
        num_stages=tiling.num_stages,
        **registers,
        **overlap,
    )
    if max_query_len > SHORT_LEN:
        long_tile = max(tiling.long_tile, triton.next_power_of_2(group))
        tiles = triton.cdiv(num_tokens, long_tile // group) + num_rows
        attend_long_rows[(min(tiling.long_programs, tiles * num_kv_heads),)](
            *inputs,
            *sizes,
            **layer,
            **shared,
            TILE=long_tile,
            BLOCK_KEYS=tiling.long_keys,
            STAGES=tiling.long_stages,
            WIDE=wide,
            num_warps=tiling.long_warps,
            **overlap,
        )
    # Many tokens: a few heads to a program, so that there are not more programs than the device takes in at once.
    merge_heads = 1 if num_tokens * num_heads <= tiling.num_programs * 4 else 4
    _merge[(num_tokens, triton.cdiv(num_heads, merge_heads))](
        query_start_loc,
        seq_lens,
        out,
        partial,
        stats,
        num_rows,
        *splitting,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        **shared,
        BLOCK_KEYS=tiling.block_keys,
        BLOCK_SPLITS=triton.next_power_of_2(max_splits),
        BLOCK_PARTS=min(triton.next_power_of_2(max_splits), 64 // merge_heads),
        HEADS=merge_heads,
        num_warps=4,
        **overlap,
    )
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `reference.attention.paged_attention`. The bounds are what the shapes allow: a caller that knows better ones
    calls `attend`.
    """
    most_keys = block_tables.shape[1] * k_cache.shape[1]
    tiling = choose_tiling(q.device, k_cache.shape[2], q.shape[2], q.element_size())
    return attend(
        q,
        k_cache,
        v_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        scale,
        window,
        q.shape[0],
        most_keys,
        tiling,
    )
