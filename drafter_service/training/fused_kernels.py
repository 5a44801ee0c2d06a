"""Which chains of small operations does training run as one GPU kernel each, forwards and backwards?

Triton kernels over rows: RMSNorm, the gated activation, the rotary embedding, and a cross-entropy to soft targets that
never writes float32 logits. Without them a step is bound by the memory traffic of float32 copies. `fused` chooses
between these and plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LANES = 2048
_NORM_PROGRAMS = 528


@triton.jit  # type: ignore[untyped-decorator]  # not annotated; absent on machines without a GPU
def _norm_forward(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    scale_ptr,
    eps,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LANES)
    inside = at < SIZE
    x = tl.load(x_ptr + row * SIZE + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(total_ptr + row * SIZE + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, normed.to(x.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    gradient_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    dw_ptr,
    num_rows,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    first = tl.program_id(0)
    at = tl.arange(0, LANES)
    inside = at < SIZE
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((LANES,), tl.float32)
    for index in range(first, num_rows, PROGRAMS):
        row = tl.cast(index, tl.int64)
        scale = tl.load(scale_ptr + row)
        normed = tl.load(x_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(gradient_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        d_weight += gradient * normed
        inner = gradient * weight
        dx = scale * (inner - normed * (tl.sum(inner * normed, 0) / SIZE))
        tl.store(dx_ptr + row * SIZE + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + first * SIZE + at, d_weight, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_forward(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = at < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    out = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, out.to(gate.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_backward(  # type: ignore[no-untyped-def]
    gradient_ptr, gate_up_ptr, d_ptr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = at < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    d_gate = gradient * up * open_ * (1.0 + gate * (1.0 - open_))
    d_up = gradient * gate * open_
    tl.store(d_ptr + row * 2 * SIZE + at, d_gate.to(d_ptr.dtype.element_ty), mask=inside)
    tl.store(d_ptr + row * 2 * SIZE + SIZE + at, d_up.to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, sign, HEADS: tl.constexpr, HEAD_ROWS: tl.constexpr, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEAD_ROWS)
    dims = tl.arange(0, HALF)
    inside = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    at = heads[:, None] * 2 * HALF + dims[None, :]
    low = tl.load(x_ptr + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + row * row_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + dims).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * HALF + dims).to(tl.float32)[None, :] * sign
    out = out_ptr + row * HEADS * 2 * HALF + at
    tl.store(out, (low * cos - high * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (high * cos + low * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _soft_entropy_forward(  # type: ignore[no-untyped-def]
    logits_ptr,
    probs_ptr,
    rows_ptr,
    loss_ptr,
    lse_ptr,
    best_ptr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HAS_PROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((LANES,), -1e30, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    product = tl.zeros((LANES,), tl.float32)
    best = tl.zeros((LANES,), tl.int32)
    target = row
    if HAS_PROBS:
        target = tl.load(rows_ptr + row)
    for start in range(0, SIZE, LANES):
        at = start + tl.arange(0, LANES)
        inside = at < SIZE
        logits = tl.load(logits_ptr + row * SIZE + at, mask=inside, other=-1e30).to(tl.float32)
        if HAS_PROBS:
            probs = tl.load(probs_ptr + target * SIZE + at, mask=inside, other=0.0).to(tl.float32)
            product += tl.where(inside, probs * logits, 0.0)
        higher = tl.maximum(highest, logits)
        total = total * tl.exp(highest - higher) + tl.where(inside, tl.exp(logits - higher), 0.0)
        best = tl.where(logits > highest, at, best)
        highest = higher
    top = tl.max(highest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    tl.store(lse_ptr + row, lse)
    if HAS_PROBS:
        tl.store(loss_ptr + row, lse - tl.sum(product, 0))
        tl.store(best_ptr + row, tl.min(tl.where(highest == top, best, SIZE), 0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _soft_entropy_backward(  # type: ignore[no-untyped-def]
    gradient_ptr, logits_ptr, probs_ptr, rows_ptr, lse_ptr, d_ptr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = at < SIZE
    target = tl.load(rows_ptr + row)
    logits = tl.load(logits_ptr + row * SIZE + at, mask=inside, other=-1e30).to(tl.float32)
    probs = tl.load(probs_ptr + target * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    d_logits = (tl.exp(logits - tl.load(lse_ptr + row)) - probs) * tl.load(gradient_ptr + row)
    tl.store(d_ptr + row * SIZE + at, d_logits.to(d_ptr.dtype.element_ty), mask=inside)


def norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed [N, H], x + residual [N, H] (x itself without one), reciprocal root mean square [N] float32)."""
    x = x.contiguous()
    rows, size = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    other = x if residual is None else residual.contiguous()
    lanes = triton.next_power_of_2(size)
    _norm_forward[(rows,)](x, other, weight, out, total, scale, eps, size, lanes, residual is not None, num_warps=4)
    return out, total, scale


def norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [N, H] and weight [H], in their dtypes."""
    rows, size = x.shape
    dx = torch.empty_like(x)
    partial = torch.empty((_NORM_PROGRAMS, size), dtype=torch.float32, device=x.device)
    lanes = triton.next_power_of_2(size)
    _norm_backward[(_NORM_PROGRAMS,)](
        gradient.contiguous(), x, weight, scale, dx, partial, rows, size, lanes, _NORM_PROGRAMS, num_warps=4
    )
    return dx, partial.sum(0).to(weight.dtype)


def silu_mul_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2I] -> [N, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    _silu_mul_forward[(rows, triton.cdiv(size, 1024))](gate_up.contiguous(), out, size, 1024, num_warps=4)
    return out


def silu_mul_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of gate_up."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    d_gate_up = torch.empty_like(gate_up)
    grid = (rows, triton.cdiv(size, 1024))
    _silu_mul_backward[grid](gradient.contiguous(), gate_up, d_gate_up, size, 1024, num_warps=4)
    return d_gate_up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """x: [N, heads, D], each row's heads side by side, D a power of two; cos, sin: [N, D / 2]; sign -1 turns back."""
    rows, heads, size = x.shape
    if x.stride(2) != 1 or x.stride(1) != size:
        x = x.contiguous()
    out = x.new_empty((rows, heads, size))
    _rotate[(rows,)](
        x, cos.contiguous(), sin.contiguous(), out, x.stride(0), sign, heads, triton.next_power_of_2(heads), size // 2,
        num_warps=2,
    )  # fmt: skip
    return out


def soft_entropy_forward(
    logits: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cross-entropy [N], log-sum-exp [N], argmax [N] int64) of logits [N, V] to probs[rows]."""
    number, size = logits.shape
    loss = torch.empty(number, dtype=torch.float32, device=logits.device)
    lse, best = torch.empty_like(loss), torch.empty(number, dtype=torch.int64, device=logits.device)
    _soft_entropy_forward[(number,)](logits, probs, rows.contiguous(), loss, lse, best, size, _LANES, True, num_warps=8)
    return loss, lse, best


def soft_entropy_backward(
    gradient: torch.Tensor, logits: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """The gradient of logits."""
    d_logits = torch.empty_like(logits)
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], _LANES))
    _soft_entropy_backward[grid](
        gradient.contiguous(), logits, probs, rows.contiguous(), lse, d_logits, logits.shape[1], _LANES, num_warps=8
    )
    return d_logits


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N] float32."""
    logits = logits.contiguous()
    lse = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _soft_entropy_forward[(logits.shape[0],)](
        logits, logits, lse, lse, lse, lse, logits.shape[1], _LANES, False, num_warps=8
    )
    return lse
