"""Which token has the greatest logit: what the reference says of ties, of zeros and of NaN."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.argmax import argmax, make_scratch

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([3.0, 1.0, 3.0], 0),
        ([-0.0, 0.0], 0),
        ([-INF, -INF], 0),
        ([INF, NAN, 5.0, NAN], 1),
        ([-INF, -1e30], 1),
    ],
)
def test_of_equals_the_first_and_nan_before_all(row: list[float], expected: int) -> None:
    out = torch.full((1,), -7)
    argmax(torch.tensor([row]), None, make_scratch(1, "cpu"), out)
    assert out.tolist() == [expected]
    argmax(torch.tensor([row]), torch.arange(len(row)) * 100 + 7, make_scratch(1, "cpu"), out)
    assert out.tolist() == [expected * 100 + 7]
