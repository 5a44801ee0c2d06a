"""A linear layer of few rows: against the reference, whatever the tiling; its counters end as they began."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import linear as plain
from kernels.triton.linear import MAX_ROWS, SkinnyTiling, num_counters, skinny_linear
from kernels.triton.linear_choice import choose_tiling
from tests.kernels.triton.device import DEVICE, DTYPES, generator, poisoned, there

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal to a few roundings of the dtype, of sums of hundreds of products."""
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance)


# (rows, outputs, inputs, tiling): one program and several, with remainders in every direction.
CASES = [
    (1, 64, 64, SkinnyTiling(32, 32)),
    (5, 50, 72, SkinnyTiling(32, 32, splits=2)),
    (17, 36, 100, SkinnyTiling(16, 16, splits=3, num_stages=2)),
    (64, 20, 64, SkinnyTiling(16, 32, splits=5)),
    (2, 48, 576, SkinnyTiling(16, 64, splits=4)),
]


@pytest.mark.parametrize(("rows", "outs", "ins", "tiling"), CASES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_reference(
    rows: int, outs: int, ins: int, tiling: SkinnyTiling, gated: bool, with_bias: bool
) -> None:
    for dtype in DTYPES:
        random = generator(rows + outs)
        x, weight = torch.randn((rows, ins), generator=random), torch.randn((outs, ins), generator=random)
        offsets = torch.randn(outs, generator=random)
        x, weight, bias = there(x.to(dtype), (weight * ins**-0.5).to(dtype), offsets.to(dtype))
        counters = torch.zeros(num_counters(outs, gated, tiling), dtype=torch.int32, device=DEVICE)
        given = bias if with_bias else None
        for _ in range(2):
            got = skinny_linear(x, weight, given, tiling, counters, gated)
            if gated:
                assert_near(got, plain.linear_silu_mul(x, weight, given), dtype)
            else:
                assert_near(got, plain.linear(x, weight, given), dtype)
            assert int(counters.abs().sum()) == 0
        if not gated:
            # Nothing is rounded to the inputs' dtype on the way.
            wide = skinny_linear(x, weight, given, tiling, counters, out_dtype=torch.float32)
            assert_near(wide, plain.linear(x, weight, given, torch.float32), torch.float32)


def test_rows_of_x_may_be_strided_and_what_lies_behind_them_is_not_read() -> None:
    tiling = SkinnyTiling(16, 16, splits=2)
    whole = torch.full((5, 48), float("nan"))
    whole[:, :32] = torch.randn((5, 32), generator=generator(1))
    (weight,) = there(torch.randn((16, 32), generator=generator(2)))
    x = whole.to(DEVICE)[:, :32]
    got = skinny_linear(x, weight, None, tiling, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert_near(got, plain.linear(x, weight, None), torch.float32)


def test_more_rows_than_it_is_made_for_are_refused() -> None:
    x, weight = torch.zeros((MAX_ROWS + 1, 16), device=DEVICE), torch.zeros((16, 16), device=DEVICE)
    with pytest.raises(ValueError, match="rows"):
        skinny_linear(x, weight, None, SkinnyTiling(16, 16), poisoned(1, dtype=torch.int32))
    assert skinny_linear(x[:0], weight, None, SkinnyTiling(16, 16), poisoned(1, dtype=torch.int32)).shape == (0, 16)


def test_a_shape_that_was_not_measured_is_torchs() -> None:
    assert choose_tiling(7, 9, False) == ()
