"""The inputs of an EAGLE-3 head's layer, equal to the reference's to a rounding."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import head_inputs as plain
from kernels.triton import head_inputs
from tests.kernels.triton.device import DTYPES, assert_near, generator, there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 96), (3, 2048), (0, 16)])
def test_head_inputs(tokens: int, size: int, dtype: torch.dtype) -> None:
    noise = generator(tokens)
    ids = torch.randint(0, 9, (tokens,), generator=noise)
    embedding = (torch.randn((9, size), generator=noise) * 2).to(dtype)
    wide = (torch.randn((tokens, 3 * size), generator=noise) * 3).to(dtype)
    norms = torch.randn((2, size), generator=noise).to(dtype)
    expected = plain.head_inputs(ids, embedding, wide[:, size : 2 * size], norms[0], norms[1], 1e-5)
    on_device = there(ids, embedding, wide, norms)
    got = head_inputs.head_inputs(
        *(on_device[0], on_device[1], on_device[2][:, size : 2 * size], on_device[3][0], on_device[3][1]), 1e-5
    )
    assert got.dtype == dtype
    assert_near(got, expected, dtype)
