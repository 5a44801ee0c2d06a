"""Compare training's Triton kernels with plain torch: run by `test_step`, in the interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

from drafter_service.training import fused_kernels
from drafter_service.training.decode_kernel import decode_attention
from drafter_service.training.dense_attention import masked_decode_attention
from kernels.reference.activation import silu_mul
from kernels.reference.norm import rms_norm, rms_norm_residual
from kernels.reference.rope import apply_rope

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def near(name: str, got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    assert error < limit, f"{name}: {error:.2e}"  # NaN fails too


def check(dtype: torch.dtype, limit: float) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, residual, weight, gradient = random(9, 72), random(9, 72), random(72), random(9, 72)
    normed, total, _ = fused_kernels.norm_forward(x, residual, weight, 1e-5)
    expected, expected_total = rms_norm_residual(x.float(), residual.float(), weight.float(), 1e-5)
    near("norm of a sum", normed, expected, limit)
    near("sum", total, expected_total, limit)
    wide_x, wide_weight = x.float().requires_grad_(), weight.float().requires_grad_()
    plain = rms_norm(wide_x, wide_weight, 1e-5)
    _, kept, scale = fused_kernels.norm_forward(x, None, weight, 1e-5)
    d_x, d_weight = fused_kernels.norm_backward(gradient, kept, weight, scale)
    for name, got, want in zip(
        ("norm dx", "norm dw"),
        (d_x, d_weight),
        torch.autograd.grad(plain, (wide_x, wide_weight), gradient.float()),
        strict=True,
    ):
        near(name, got, want, limit)

    gate_up, gradient = random(4, 2 * 1100), random(4, 1100)
    wide = gate_up.float().requires_grad_()
    near("gate", fused_kernels.silu_mul_forward(gate_up), silu_mul(wide), limit)
    (d_wide,) = torch.autograd.grad(silu_mul(wide), wide, gradient.float())
    near("gate's gradient", fused_kernels.silu_mul_backward(gradient, gate_up), d_wide, limit)

    qkv, cos, sin = random(6, 15, 16), random(6, 8), random(6, 8)
    q, k = apply_rope(qkv[:, :9].float(), qkv[:, 9:12].float(), cos.float(), sin.float())
    near("rotation", fused_kernels.rotate(qkv[:, :12], cos, sin, 1.0), torch.cat((q, k), 1), limit)
    back = fused_kernels.rotate(fused_kernels.rotate(qkv[:, :12], cos, sin, 1.0), cos, sin, -1.0)
    size = (cos.float() ** 2 + sin.float() ** 2).repeat(1, 2)[:, None]
    near("rotation and back", back, qkv[:, :12].float() * size, limit)

    logits, probs = 3 * random(7, 3000), torch.randn(4, 3000, device=DEVICE).softmax(-1).to(dtype)
    rows = torch.tensor([0, 3, 2, 2, 1, 0, 3], device=DEVICE)
    loss, lse, best = fused_kernels.soft_entropy_forward(logits, probs, rows)
    wide = logits.float().requires_grad_()
    plain = wide.logsumexp(-1) - (probs[rows].float() * wide).sum(-1)
    near("cross-entropy", loss, plain, 1e-4)
    near("log-sum-exp", fused_kernels.logsumexp(logits), wide.logsumexp(-1), 1e-4)
    assert torch.equal(wide.gather(1, best[:, None])[:, 0], wide.amax(1)), "argmax"
    weights = torch.randn(7, device=DEVICE)
    (d_wide,) = torch.autograd.grad(plain, wide, weights)
    near("its gradient", fused_kernels.soft_entropy_backward(weights, logits, probs, rows, lse), d_wide, limit)


def check_decoding() -> None:
    """One new token of each sequence over its dense cache, with and without a window."""
    q = torch.randn(4, 6, 16, device=DEVICE)
    k, v = (torch.randn(4, 150, 2, 16, device=DEVICE) for _ in range(2))
    lens = torch.tensor([1, 64, 65, 150], device=DEVICE)
    for window in (None, 20):
        expected = masked_decode_attention(q, k, v, lens, 0.25, window)
        near(f"decoding, window {window}", decode_attention(q, k, v, lens, 0.25, window), expected, 1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_decoding()
    check(torch.float32, 1e-5)
    check(torch.bfloat16, 2e-2)
    print("all agree")
