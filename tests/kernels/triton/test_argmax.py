"""Which token has the greatest logit: the reference's, whatever the dtype, the stride, and however a row is cut."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import argmax as plain
from kernels.triton import argmax as kernel
from tests.kernels.triton.device import DEVICE, DTYPES, generator, poisoned, there

INF, NAN = float("inf"), float("nan")


def check(logits: torch.Tensor, ids: torch.Tensor | None, scratch: torch.Tensor) -> list[int]:
    """What the kernel says, which is what the reference says of the same logits on a CPU; scratch is zeros again."""
    rows = logits.shape[0]
    out, expected = poisoned(rows + 1), torch.empty(rows, dtype=torch.int64)
    kernel.argmax(logits, None if ids is None else ids.to(DEVICE), scratch, out[:rows])
    plain.argmax(logits.cpu(), ids, plain.make_scratch(rows, "cpu"), expected)
    assert out[:rows].tolist() == expected.tolist()
    assert out[rows:].tolist() == poisoned(1).tolist()
    assert not scratch.any()
    return expected.tolist()


# One program a row, several with an uneven end, several that each take turns.
SHAPES = [(1, 1), (3, 7), (2, 5000), (1, 10241), (9, 3000), (9, 17000)]


@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_equals_the_reference(rows: int, vocab: int) -> None:
    """Repeatedly, because a launch meets the last one's scratch. Rows of a wider tensor, with NaN behind; in the end
    with winners in places all over the row, the last one too.
    """
    scratch = kernel.make_scratch(rows + 1, DEVICE)
    ids = torch.randperm(vocab, generator=generator(vocab)) * 3
    for dtype in DTYPES:
        wide = torch.full((rows, vocab + 5), NAN)
        wide[:, :vocab] = torch.randn((rows, vocab), generator=generator(rows + vocab)) - 3
        logits = wide.to(DEVICE, dtype)[:, :vocab]
        for given in (None, ids):
            check(logits, given, scratch)
        places = torch.arange(rows, 0, -1) * vocab // rows - 1
        logits[torch.arange(rows), places] = 9.0
        assert check(logits, None, scratch) == places.tolist()


@pytest.mark.parametrize("rows", [2, 12])
def test_of_equals_the_first_wins_and_nan_before_all(rows: int) -> None:
    """Equals side by side, in two programs, in two turns of one, in all places at once."""
    vocab = 9001
    scratch = kernel.make_scratch(rows, DEVICE)
    signs = torch.where(torch.arange(vocab) % 3 == 0, -0.0, 0.0)
    negative_nan = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)
    assert bool(negative_nan.isnan())
    for background, values in (
        (-1.0, {5: 4.0, 6: 4.0}),
        (-1.0, {8999: 4.0, 2048: 4.0, 4097: 4.0}),
        (-INF, {}),
        (-INF, {9000: -3e38}),
        (INF, {}),
        (NAN, {0: INF}),
        (2.0, {7000: NAN, 6999: INF, 8000: NAN}),
        (-1.0, {4100: float(negative_nan), 4000: INF}),
        (-1e-45, {}),
        (-1e-45, {8000: -0.0, 8500: 0.0}),
        (signs, {}),
    ):
        one = torch.full((vocab,), background) if isinstance(background, float) else background.clone()
        for column, value in values.items():
            one[column] = value
        # The last row is the other way round: no row decides for another.
        (logits,) = there(torch.stack([one] * (rows - 1) + [one.flip(0)]))
        found = check(logits, None, scratch)
        assert len(set(found[:-1])) == 1


def test_rows_that_do_not_fit_the_scratch_are_refused() -> None:
    logits, out = torch.zeros((3, 8), device=DEVICE), poisoned(3)
    with pytest.raises(ValueError, match="3 rows"):
        kernel.argmax(logits, None, kernel.make_scratch(2, DEVICE), out)
    assert out.tolist() == poisoned(3).tolist()
    kernel.argmax(logits[:0], None, kernel.make_scratch(0, DEVICE), out[:0])
