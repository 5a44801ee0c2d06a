"""Does a packed linear give torch's own result, and a row the same bits whatever stands beside it?"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from engine.linear import PackedLinear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 40), (576, 96), (1536, 64)])
def test_equals_torch(in_features: int, out_features: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.05
    offset = torch.randn(out_features, generator=generator) if bias else None
    packed = PackedLinear(weight, offset)
    assert packed.packed
    with torch.inference_mode():
        for num in (0, 1, 2, 5, 33):
            x = torch.randn(num, in_features, generator=generator)
            torch.testing.assert_close(packed(x), linear(x, weight, offset), atol=2e-5, rtol=0)
    assert torch.equal(packed.weight, weight)


@pytest.mark.parametrize("in_features", [576, 1536, 3072])
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(in_features: int) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = PackedLinear(torch.randn(64, in_features, generator=generator))
    x = torch.randn(20, in_features, generator=generator)
    with torch.inference_mode():
        crowd = packed(x)
        alone = torch.cat([packed(x[row : row + 1]) for row in range(20)])
        five = torch.cat([packed(x[row : row + 5]) for row in range(0, 20, 5)])
    assert torch.equal(crowd, alone)
    assert torch.equal(crowd, five)


def test_other_dtypes_are_run_by_torch_itself() -> None:
    weight = torch.randn(8, 16).to(torch.bfloat16)
    plain = PackedLinear(weight)
    assert not plain.packed
    assert plain.weight is weight
    x = torch.randn(3, 16).to(torch.bfloat16)
    assert torch.equal(plain(x), linear(x, weight))
