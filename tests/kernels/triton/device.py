"""Where the kernels under test run, and on which dtypes: bfloat16 only on a GPU, the interpreter gets it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
# How many sizes or cases a test goes through: a launch takes 15 ms under the interpreter.
MANY = 40 if ON_GPU else 4

POISON = 987_654_321


def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies on the device under test."""
    return [tensor.detach().clone().to(DEVICE) for tensor in tensors]


def poisoned(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A buffer full of garbage on the device under test: what a kernel leaves unwritten shows."""
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


def generator(seed: int) -> torch.Generator:
    """Of the CPU: cases are the same on every device."""
    return torch.Generator().manual_seed(seed)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal to a few roundings of the dtype."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance)


def call(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), for arguments that come in lists: a type checker cannot count those."""
    return function(*arguments)
