"""The gated activation between the two halves of an MLP. See `reference.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.overlap import gdc_launch_dependents, gdc_wait, overlap_options

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded between the two steps, as the reference's two operations are.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.activation.silu_mul`. gate_up's last dimension is contiguous."""
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0] == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(size))
    _silu_mul[(rows.shape[0], triton.cdiv(size, block))](
        rows, out, rows.stride(0), SIZE=size, BLOCK=block, num_warps=4, **overlap_options(out.device)
    )
    return out
