"""Norm, rotary embedding, gated activation and KV writes, against transformers' own modules and against plain words."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.layout import PAD_SLOT
from kernels.reference.activation import silu_mul
from kernels.reference.kv_write import write_kv
from kernels.reference.norm import rms_norm, rms_norm_residual
from kernels.reference.rope import apply_rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 2, 33), (0, 8)])
def test_rms_norm_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    module = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    module.weight.data = torch.randn(shape[-1]).to(dtype)
    expected = module(x)
    got = rms_norm(x, module.weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)

    residual = torch.randn(shape).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = rms_norm_residual(x, residual, module.weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, module(x + residual), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
def test_rope_equals_transformers(dtype: torch.dtype, half: bool) -> None:
    tokens, heads, kv_heads, dim = 5, 6, 2, 16
    # As the decoder hands them over: views into one fused projection.
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q = fused[:, : heads * dim].view(tokens, heads, dim)
    k = fused[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    angles = torch.arange(40, 40 + tokens)[:, None] / 100 ** (torch.arange(dim // 2) / dim)
    cos, sin = torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((angles, angles), -1).sin().to(dtype)
    expected_q, expected_k = apply_rotary_pos_emb(
        q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None]
    )
    width = dim // 2 if half else dim
    got_q, got_k = apply_rope(q, k, cos[:, :width], sin[:, :width])
    assert torch.equal(got_q, expected_q[0].transpose(0, 1))
    assert torch.equal(got_k, expected_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 3, 37).to(dtype)
    got = silu_mul(torch.cat((gate, up), dim=-1))
    # Vector code and its scalar tail differ by a rounding, and memory alignment decides which element gets which.
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_lands_in_its_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 5, 2, 3)
    slots = torch.tensor([7, PAD_SLOT, 0, 11, PAD_SLOT, 4])
    k_cache, v_cache = torch.full((2, 3, 4, 2, 3), 77.0, dtype=dtype)
    write_kv(k, v, slots, k_cache, v_cache)
    for written, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.view(12, 2, 3)
        for token, slot in ((0, 7), (2, 0), (3, 11)):
            assert torch.equal(flat[slot], written[token].to(dtype))
        untouched = [slot for slot in range(12) if slot not in (7, 0, 11)]
        assert (flat[untouched] == 77).all()
