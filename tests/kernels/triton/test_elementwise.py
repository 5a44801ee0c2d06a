"""Norm, rotary embedding, gated activation and KV writes."""

from __future__ import annotations

import pytest
import torch

from kernels.layout import PAD_SLOT
from kernels.reference import activation as plain_activation
from kernels.reference import kv_write as plain_write
from kernels.reference import norm as plain_norm
from kernels.reference import rope as plain_rope
from kernels.reference import rope_kv_write as plain_rope_write
from kernels.triton import activation, kv_write, norm, rope, rope_kv_write
from tests.kernels.triton.device import DTYPES, ON_GPU, assert_near, generator, there

# Query heads, KV heads, head_dim: 3:1 and 4:1 groups, odd counts, a head_dim that is no power of two.
HEADS = [(9, 3, 16), (8, 2, 64), (4, 1, 128), (5, 5, 10)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 2, 33), (2, 2048), (0, 8)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    noise = generator(1)
    x, residual = (torch.randn((2, *shape), generator=noise) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=noise).to(dtype)
    device_x, device_residual, device_weight = there(x, residual, weight)
    got = norm.rms_norm(device_x, device_weight, 1e-5)
    assert got.dtype == dtype
    assert_near(got, plain_norm.rms_norm(x, weight, 1e-5), dtype)
    normed, total = norm.rms_norm_residual(device_x, device_residual, device_weight, 1e-5)
    expected, expected_total = plain_norm.rms_norm_residual(x, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), expected_total)
    assert_near(normed, expected, dtype)
    # What is normalised is the sum as it was rounded.
    again = norm.rms_norm(total, device_weight, 1e-5)
    assert_near(normed, again, dtype)
    assert ON_GPU or torch.equal(normed, again)  # two compiled kernels may add up in another order
    assert torch.equal(device_x.cpu(), x)
    assert torch.equal(device_residual.cpu(), residual)


def test_rms_norm_of_strided_rows_and_a_wider_weight() -> None:
    (x,) = there(torch.randn((4, 48), generator=generator(2)))
    (weight,) = there(torch.randn(24, generator=generator(3)))
    assert_near(norm.rms_norm(x[:, 8:32], weight, 1e-6), plain_norm.rms_norm(x[:, 8:32], weight, 1e-6), torch.float32)
    assert norm.rms_norm(x[:, 8:32].half(), weight, 1e-6).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 14), (3, 2, 74), (2, 2600), (0, 8)])
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=generator(4)) * 4).to(dtype)
    got = activation.silu_mul(*there(gate_up))
    assert got.dtype == dtype
    assert_near(got, plain_activation.silu_mul(gate_up), dtype)


def projections(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v on the device, as a decoder hands them over: views into one fused projection."""
    width = (heads + 2 * kv_heads) * head_dim
    (fused,) = there(torch.randn((tokens, width), generator=generator(5)).to(dtype))
    q, k, v = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    kv_shape = (tokens, kv_heads, head_dim)
    return q.view(tokens, heads, head_dim), k.view(kv_shape), v.view(kv_shape)


def angles(tokens: int, head_dim: int, full: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """cos and sin on the device, [tokens, head_dim / 2], or both halves."""
    half = head_dim // 2
    angle = torch.arange(40, 40 + tokens)[:, None] / 100 ** (torch.arange(half) / half)
    if full:
        angle = torch.cat((angle, angle), -1)
    return there(angle.cos().to(dtype), angle.sin().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_rope(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    q, k, _ = projections(3, heads, kv_heads, head_dim, dtype)
    cos, sin = angles(3, head_dim, heads % 2 == 0, dtype)
    for got, expected in zip(rope.apply_rope(q, k, cos, sin), plain_rope.apply_rope(q, k, cos, sin), strict=True):
        assert got.dtype == dtype
        assert_near(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_kv_lands_in_its_slots_and_nowhere_else(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """write_kv, and the write fused with the embedding; PAD slots, slots of blocks far apart, poisoned caches."""
    q, k, v = projections(5, heads, kv_heads, head_dim, dtype)
    cos, sin = angles(5, head_dim, heads % 2 == 0, dtype)
    (slots,) = there(torch.tensor([7, PAD_SLOT, 0, 11, PAD_SLOT, 4]))
    for cache_dtype in {dtype, torch.float32}:
        caches = torch.full((4, 3, 4, kv_heads, head_dim), 77.0, dtype=cache_dtype, device=q.device)
        expected = caches.clone()
        plain_write.write_kv(k, v, slots, expected[0], expected[1])
        kv_write.write_kv(k, v, slots, caches[0], caches[1])
        assert torch.equal(caches[:2], expected[:2])

        expected_q = plain_rope_write.rope_kv_write(q, k, v, cos, sin, slots, expected[2], expected[3])
        got_q = rope_kv_write.rope_kv_write(q, k, v, cos, sin, slots, caches[2], caches[3])
        assert_near(got_q, expected_q, dtype)
        assert_near(caches[2], expected[2], dtype)
        assert torch.equal(caches[3], expected[3])
        assert int((caches[2] == 77).all(dim=(2, 3)).sum()) == 12 - 3


def test_the_parts_and_the_fused_write_agree_to_the_bit() -> None:
    q, k, v = projections(4, 9, 3, 16, torch.float32)
    cos, sin = angles(4, 16, False, torch.float32)
    (slots,) = there(torch.tensor([2, 5, PAD_SLOT, 0]))
    caches = torch.zeros((4, 2, 4, 3, 16), device=q.device)
    rotated_q, rotated_k = rope.apply_rope(q, k, cos, sin)
    kv_write.write_kv(rotated_k, v, slots, caches[0], caches[1])
    assert torch.equal(rope_kv_write.rope_kv_write(q, k, v, cos, sin, slots, caches[2], caches[3]), rotated_q)
    assert torch.equal(caches[2:], caches[:2])


def test_heads_that_are_not_side_by_side() -> None:
    """A layout that no stride of tokens describes is copied, not misread."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in projections(3, 4, 2, 16, torch.float32))
    cos, sin = angles(3, 16, False, torch.float32)
    (slots,) = there(torch.tensor([2, 5, 0]))
    caches = torch.zeros((4, 2, 4, 2, 16), device=q.device)
    expected = plain_rope_write.rope_kv_write(q, k, v, cos, sin, slots, caches[0], caches[1])
    assert_near(rope_kv_write.rope_kv_write(q, k, v, cos, sin, slots, caches[2], caches[3]), expected, torch.float32)
    assert_near(caches[2:], caches[:2], torch.float32)
    assert_near(rope.apply_rope(q, k, cos, sin)[0], expected, torch.float32)


def test_nothing_to_do() -> None:
    q, k, v = projections(0, 4, 2, 16, torch.float32)
    cos, sin = angles(0, 16, False, torch.float32)
    slots = torch.zeros(0, dtype=torch.int64, device=q.device)
    cache = torch.zeros((1, 4, 2, 16), device=q.device)
    kv_write.write_kv(k, v, slots, cache, cache)
    assert rope.apply_rope(q, k, cos, sin)[0].shape == (0, 4, 16)
    assert rope_kv_write.rope_kv_write(q, k, v, cos, sin, slots, cache, cache).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_a_fused_projection_and_a_sum_with_a_place_of_its_own(dtype: torch.dtype) -> None:
    """Heads are read where they lie; the sum goes into a strided column and nothing beside it is touched."""
    q, k, _ = projections(3, 4, 2, 16, dtype)
    (weight,) = there(torch.randn(16, generator=generator(3)).to(dtype))
    assert not q.is_contiguous()
    for heads in (q, k):
        assert_near(norm.rms_norm(heads, weight, 1e-5), plain_norm.rms_norm(heads, weight, 1e-5), dtype)
    x, residual = there(*(torch.randn((3, 16), generator=generator(seed)).to(dtype) for seed in (4, 5)))
    wide = torch.full((3, 48), 77.0, dtype=dtype, device=x.device)
    expected = plain_norm.rms_norm_residual(x, residual, weight, 1e-5)
    got = norm.rms_norm_residual(x, residual, weight, 1e-5, wide[:, 16:32])
    assert_near(got[0], expected[0], dtype)
    assert torch.equal(wide[:, 16:32], expected[1])
    assert bool((wide[:, :16] == 77).all() & (wide[:, 32:] == 77).all())
    again = norm.rms_norm_residual(x, wide[:, 16:32], weight, 1e-5)
    assert_near(again[0], plain_norm.rms_norm_residual(x, expected[1], weight, 1e-5)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_angles(dtype: torch.dtype) -> None:
    positions, inv_freq = there(torch.tensor([0, 1, 77, 8191, 131071]), 10000.0 ** -torch.linspace(0, 0.9, 24))
    for scaling in (1.0, 1.25):
        got = rope.rotary_angles(positions, inv_freq, scaling, dtype)
        for mine, theirs in zip(got, plain_rope.rotary_angles(positions, inv_freq, scaling, dtype), strict=True):
            assert mine.dtype == dtype
            assert_near(mine, theirs, dtype)
