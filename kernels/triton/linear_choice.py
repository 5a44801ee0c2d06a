"""Which form runs a linear layer of few rows fastest?

Measured on an H200 by `benchmarks.linear`; nothing is searched at run time. For every shape of weight: up to how many
rows which tiling of `skinny_linear` runs it, or torch's own product where that is no slower. A shape that was not
measured runs on torch's.
"""

from __future__ import annotations

from kernels.triton.linear import SkinnyTiling

# (outputs, inputs, gated): ((rows, tiling up to them), ...), ascending. None: torch's own.
_Steps = tuple[tuple[int, SkinnyTiling | None], ...]
_MEASURED: dict[tuple[int, int, bool], _Steps] = {}


def choose_tiling(out_features: int, in_features: int, gated: bool) -> _Steps:
    """The steps for a weight [out_features, in_features] in bfloat16; empty: always torch's own."""
    return _MEASURED.get((out_features, in_features, gated), ())
