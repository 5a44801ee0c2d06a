"""A linear layer of a handful of rows, with the norm before it. See `reference.linear.norm_linear`.

With one to four rows the matrix units have nothing to do: each program reads whole rows of the weight straight into
registers and multiplies there, so that nothing stands between two loads. The norm of the inputs is done anew by every
program, which costs nothing while its first piece of the weight is on the way, and saves a launch that the memory would
idle through; the first program writes the sum with the residual down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.overlap import gdc_launch_dependents, gdc_wait, overlap_options

MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class RowTiling:
    """block_out: outputs of a program (of each half, where the output is gated); block_in: inputs of one turn of its
    loop, a power of two; num_warps: as Triton has it.
    """

    block_out: int
    block_in: int
    num_warps: int = 4


@triton.jit
def _total(x_ptr, residual_ptr, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """x, or its sum with the residual rounded to x's dtype; float32."""
    total = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _norm_linear(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    residual_stride,
    total_stride,
    size_out,
    size_in,
    eps,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """size_out: outputs written: half of the weight's rows where GATED."""
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inputs = tl.arange(0, BLOCK_IN)
    rows = tl.arange(0, ROWS)
    row_mask = rows < num_rows
    out_mask = outs < size_out
    # Rows past the end read row 0 and are never written.
    weight_ptrs = weight_ptr + tl.where(out_mask, outs, 0).to(tl.int64)[:, None] * size_in + inputs[None, :]
    half = size_out.to(tl.int64) * size_in
    # A piece of the weight is on its way while the one before is worked on; the first, while the kernel before runs.
    mask = inputs < size_in
    weight = tl.load(weight_ptrs, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
    up = weight
    if GATED:
        up = tl.load(weight_ptrs + half, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    scales = tl.full([ROWS], 1.0, tl.float32)
    if NORMED:
        every = tl.arange(0, BLOCK_ALL)
        every_mask = row_mask[:, None] & (every < size_in)[None, :]
        whole = tl.load(x_ptr + rows[:, None] * size_in + every[None, :], mask=every_mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            every_ptrs = residual_ptr + rows[:, None] * residual_stride + every[None, :]
            whole += tl.load(every_ptrs, mask=every_mask, other=0.0).to(tl.float32)
            kept = whole.to(total_ptr.dtype.element_ty)
            whole = kept.to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + rows[:, None] * total_stride + every[None, :], kept, mask=every_mask)
        scales = tl.rsqrt(tl.sum(whole * whole, axis=1) / size_in + eps)
    sums = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK_OUT, BLOCK_IN], tl.float32)
    for begin in tl.range(0, size_in, BLOCK_IN):
        columns = begin + inputs
        mask = columns < size_in
        after = columns + BLOCK_IN < size_in
        next_ptrs = weight_ptrs + begin + BLOCK_IN
        next_weight = tl.load(next_ptrs, mask=after[None, :], other=0.0, eviction_policy="evict_first")
        next_up = next_weight
        if GATED:
            next_up = tl.load(next_ptrs + half, mask=after[None, :], other=0.0, eviction_policy="evict_first")
        x_mask = row_mask[:, None] & mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * size_in + columns[None, :], mask=x_mask, other=0.0).to(tl.float32)
        if NORMED:
            if HAS_RESIDUAL:
                residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
                x += tl.load(residual_ptrs, mask=x_mask, other=0.0).to(tl.float32)
                x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
            # Rounded as the norm's two steps are.
            norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            x = (x * scales[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
            x = (x * norm[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
        sums += weight.to(tl.float32)[None, :, :] * x[:, None, :]
        if GATED:
            up_sums += up.to(tl.float32)[None, :, :] * x[:, None, :]
        weight = next_weight
        up = next_up
    total = tl.sum(sums, axis=2)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total_up = tl.sum(up_sums, axis=2)
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + size_out + outs, mask=out_mask, other=0.0).to(tl.float32)[None, :]
        # Rounded as the product, and then as silu_mul's two operations.
        gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
        total = silu * total_up.to(out_ptr.dtype.element_ty).to(tl.float32)
    where = rows[:, None].to(tl.int64) * size_out + outs[None, :]
    tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & out_mask[None, :])


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: RowTiling,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`reference.linear.linear`, or with `gated` `linear_silu_mul`, for up to MAX_ROWS rows. x, weight: contiguous."""
    return _launch(x, None, None, 0.0, weight, bias, tiling, gated, out_dtype, None)[0]


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: RowTiling,
    gated: bool = False,
    out_total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`row_linear` of the normed x + residual, x + residual): `reference.norm.rms_norm_residual` before the product.

    x [M, K], weight: contiguous; residual [M, K], or None: rows may be strided; out_total: see there.
    """
    return _launch(x, residual, norm, eps, weight, bias, tiling, gated, None, out_total)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: RowTiling,
    gated: bool,
    out_dtype: torch.dtype | None,
    out_total: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size_in = x.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"x: {num_rows} rows, row_linear takes up to {MAX_ROWS}")
    x = x.contiguous()
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out_total is None else out_total
    if num_rows == 0:
        return out, total
    _norm_linear[(triton.cdiv(size_out, tiling.block_out),)](
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out,
        total,
        num_rows,
        x.stride(0) if residual is None else residual.stride(0),
        total.stride(0),
        size_out,
        size_in,
        eps,
        ROWS=triton.next_power_of_2(num_rows),
        NORMED=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        HAS_BIAS=bias is not None,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        BLOCK_ALL=triton.next_power_of_2(size_in),
        num_warps=tiling.num_warps,
        **overlap_options(x.device),
    )
    return out, total
