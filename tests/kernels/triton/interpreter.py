"""Can Triton's interpreter run the kernels here? Answered without importing Triton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import numpy as np


def what_is_missing() -> str | None:
    """Why the interpreter cannot run the kernels on this machine; None where it can."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return "the package triton is not installed"

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    if numbers(triton) < (3, 7) and numbers(np.__version__) >= (2, 4):
        return f"the interpreter of triton {triton} does not work with numpy {np.__version__}"
    return None
