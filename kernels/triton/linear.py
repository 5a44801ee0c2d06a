"""A linear layer of few rows, at the speed of reading its weight. See `reference.linear`.

With up to 64 rows a product costs what its weight takes to come from memory. Here each program goes over a tile of
outputs, and where those alone are too few to keep the memory busy, over a stretch of the inputs: the programs of one
tile leave their sums in scratch, and the last one to arrive adds them, always in the same order, so that the result
does not depend on who is last. Nothing is read twice, nothing is launched for the sums.

Which form runs a shape is a matter of measurement (`linear_choice.py`), not of a search while serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.overlap import fetch_ahead, gdc_launch_dependents, gdc_launch_if, gdc_wait, overlap_options

# Rows of x up to which these kernels make sense.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """block_out: outputs of a program (of each half, where the output is gated). block_in: inputs of one turn of its
    loop. splits: programs that share a tile's inputs. num_warps, num_stages: as Triton has them.

    Where launches overlap: trigger: how many turns before its last a program lets the next launch in (0: after it);
    None: at its start. ahead: bytes of each of its rows of weight that a program asks for while it waits for the launch
    before; 0 or a multiple of 64.
    """

    block_out: int
    block_in: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    trigger: int | None = None
    ahead: int = 0


# Sizes and x_stride are specialised: only what is known to be a multiple of 16 is copied to shared memory ahead of use.
@triton.jit(do_not_specialize=["num_rows", "splits"])
def _skinny(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scratch_ptr,
    counters_ptr,
    num_rows,
    x_stride,
    size_out,
    size_in,
    splits,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    TRIGGER: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """size_out: outputs written: half of the weight's rows where GATED. EVEN: size_in is a multiple of BLOCK_IN.
    TRIGGER: -1: at the start. AHEAD: in elements.
    """
    DOT: tl.constexpr = tl.float32 if WIDE else x_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    out_mask = outs < size_out
    row_mask = rows < num_rows
    inputs = tl.arange(0, BLOCK_IN)
    # Rows past the end read row 0 and are never written: no mask in the loop.
    safe_outs = tl.where(out_mask, outs, 0).to(tl.int64)
    safe_rows = tl.where(row_mask, rows, 0)
    split_len = tl.cdiv(tl.cdiv(size_in, BLOCK_IN), splits) * BLOCK_IN
    first = split * split_len
    weight_ptrs = weight_ptr + safe_outs[:, None] * size_in + first + inputs[None, :]
    up_ptrs = weight_ptrs
    if GATED:
        up_ptrs += size_out.to(tl.int64) * size_in
    if OVERLAP:
        if TRIGGER < 0:
            gdc_launch_dependents()
        if AHEAD > 0:
            # What is asked for too early only takes the turn of what the launch before still reads: so launches that
            # read much let the next one in late (TRIGGER). One request a thread: BLOCK_OUT rows, in pieces.
            PIECES: tl.constexpr = NUM_THREADS // BLOCK_OUT if NUM_THREADS > BLOCK_OUT else 1
            PIECE: tl.constexpr = AHEAD // PIECES
            SIZE: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
            requests = tl.arange(0, PIECES * BLOCK_OUT)
            ahead_rows = tl.minimum(tile * BLOCK_OUT + requests // PIECES, size_out - 1).to(tl.int64)
            columns = first + requests % PIECES * PIECE
            in_weight = columns + PIECE <= size_in
            ahead_ptrs = weight_ptr + ahead_rows * size_in + tl.where(in_weight, columns, 0)
            fetch_ahead(ahead_ptrs, PIECE * SIZE)
            if GATED:
                fetch_ahead(ahead_ptrs + size_out.to(tl.int64) * size_in, PIECE * SIZE)
        gdc_wait()
    x_ptrs = x_ptr + safe_rows[None, :] * x_stride + first + inputs[:, None]
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    end = tl.minimum(first + split_len, size_in)
    for begin in tl.range(first, end, BLOCK_IN, num_stages=STAGES):
        if OVERLAP and TRIGGER > 0:
            gdc_launch_if(begin + TRIGGER * BLOCK_IN >= end)
        if EVEN:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs, eviction_policy="evict_first")
        else:
            mask = begin + inputs < size_in
            x = tl.load(x_ptrs, mask=mask[:, None], other=0.0)
            weight = tl.load(weight_ptrs, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
        total = tl.dot(weight.to(DOT), x.to(DOT), total, input_precision="ieee")
        if GATED:
            if EVEN:
                up = tl.load(up_ptrs, eviction_policy="evict_first")
            else:
                up = tl.load(
                    up_ptrs,
                    mask=(begin + inputs < size_in)[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
            total_up = tl.dot(up.to(DOT), x.to(DOT), total_up, input_precision="ieee")
        weight_ptrs += BLOCK_IN
        up_ptrs += BLOCK_IN
        x_ptrs += BLOCK_IN

    if OVERLAP and TRIGGER >= 0:
        gdc_launch_dependents()
    mask = out_mask[:, None] & row_mask[None, :]
    where = rows[None, :].to(tl.int64) * size_out + outs[:, None]
    is_last = True
    if SPLIT:
        # Row s * HALVES + h of the scratch: half h of split s.
        part_size = num_rows.to(tl.int64) * size_out
        parts_ptr = scratch_ptr + split * HALVES * part_size
        tl.store(parts_ptr + where, total, mask=mask)
        if GATED:
            tl.store(parts_ptr + part_size + where, total_up, mask=mask)
        # Every thread's sums are there before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        is_last = arrived == splits - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)  # ready for the next launch
            total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
            total_up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
            for part in range(splits):
                parts_ptr = scratch_ptr + part * HALVES * part_size
                # From the L2 cache, where the others left it.
                total += tl.load(parts_ptr + where, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(parts_ptr + part_size + where, mask=mask, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if HAS_BIAS:
                total_up += tl.load(bias_ptr + size_out + outs, mask=out_mask, other=0.0).to(tl.float32)[:, None]
            # Rounded as the product, and then as silu_mul's two operations.
            gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
            total = silu * total_up.to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=mask)


_INTERPRETED = not isinstance(_skinny, triton.JITFunction)


def num_counters(out_features: int, gated: bool, tiling: SkinnyTiling) -> int:
    """How many counters `skinny_linear` needs for a weight of this many rows."""
    outs = out_features // 2 if gated else out_features
    return -(-outs // tiling.block_out)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: SkinnyTiling,
    counters: torch.Tensor,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`reference.linear.linear`, or with `gated` `linear_silu_mul`, for up to MAX_ROWS rows.

    counters: [num_counters] int32, zeros, and zeros again afterwards; of one stream of work at a time. weight:
    contiguous; a row of x is contiguous. Raises ValueError on more rows.
    """
    num_rows, size_in = x.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"x: {num_rows} rows, skinny_linear takes up to {MAX_ROWS}")
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    scratch = counters
    if tiling.splits > 1:
        parts = tiling.splits * (2 if gated else 1)
        scratch = torch.empty(parts * num_rows * size_out, dtype=torch.float32, device=x.device)
    _skinny[(triton.cdiv(size_out, tiling.block_out), tiling.splits)](
        x,
        weight,
        x if bias is None else bias,
        out,
        scratch,
        counters,
        num_rows,
        x.stride(0),
        size_out,
        size_in,
        tiling.splits,
        GATED=gated,
        HAS_BIAS=bias is not None,
        EVEN=size_in % tiling.block_in == 0,
        BLOCK_ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        NUM_THREADS=32 * tiling.num_warps,
        SPLIT=tiling.splits > 1,
        STAGES=tiling.num_stages,
        WIDE=_INTERPRETED or x.dtype == torch.float32,
        TRIGGER=-1 if tiling.trigger is None else tiling.trigger,
        AHEAD=tiling.ahead // x.element_size(),
        num_warps=tiling.num_warps,
        **overlap_options(x.device),
    )
    return out
