"""How are a kernel's results on a GPU held against its reference's?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.reference.verify import Verdict

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
# Of `near`.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated inside without being written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal values of `dtype`, seeded by the shape."""
    generator = torch.Generator(DEVICE).manual_seed(sum((index + 3) * size for index, size in enumerate(shape)))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The error's norm within `tolerance` of the result's, and no value off by 30 times that share of the largest."""
    assert got.shape == expected.shape
    wide, exact = got.double(), expected.double()
    assert bool(wide.isfinite().all())
    assert float((wide - exact).norm()) <= tolerance * float(exact.norm())
    assert float((wide - exact).abs().max()) <= 30 * tolerance * float(exact.abs().max())


def same(got: object, expected: object) -> None:
    """Equal, element for element."""
    if isinstance(got, Verdict):
        assert isinstance(expected, Verdict)
        for name in ("tokens", "num_sampled", "num_accepted"):
            same(getattr(got, name), getattr(expected, name))
    else:
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def junk(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, 987_654_321, dtype=dtype, device=DEVICE)
