"""Root-mean-square layer norm, with and without a residual. See `reference.norm`.

One program per token holds the whole row in registers: read once, written once. Roundings are those of the reference:
the sum with the residual and the normalised value are rounded to their dtype before they go on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.overlap import gdc_launch_dependents, gdc_wait, overlap_options


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    total_stride,
    eps,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row t * PARTS + h is part h of token t: a head, where heads are normed one by one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    part_start = row % PARTS * SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row // PARTS * x_stride + part_start + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * total_stride + columns, total, mask=mask)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out_total: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total); without a residual nothing is written to `total`, which is then x itself."""
    size = x.shape[-1]
    parts = 1
    if residual is None and x.dim() == 3 and x.stride(1) == size and x.stride(2) == 1:
        # The heads of a fused projection: taken where they are.
        parts, rows, num_rows = x.shape[1], x, x.shape[0] * x.shape[1]
    else:
        rows = x.reshape(-1, size)
        num_rows = rows.shape[0]
    added = rows if residual is None else residual.reshape(-1, size)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out_total is None else out_total
    if num_rows == 0:
        return out, total
    block = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        rows,
        added,
        weight,
        out,
        total,
        rows.stride(0),
        added.stride(0),
        size if out_total is None else out_total.stride(0),
        eps,
        PARTS=parts,
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)),
        **overlap_options(x.device),
    )
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.norm.rms_norm`. x's last dimension is contiguous."""
    return _launch(x, None, weight, eps, None)[0]


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.norm.rms_norm_residual`. Last dimensions are contiguous."""
    return _launch(x, residual, weight, eps, out_total)
