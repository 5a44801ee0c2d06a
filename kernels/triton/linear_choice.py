"""Which form runs a linear layer of few rows fastest?

Measured on an H200 by `benchmarks.linear`, and in a whole forward by `benchmarks.forward`: there our products gain from
launches that overlap (`overlap.py`). Nothing is searched at run time. For every shape of weight: up to how many rows
which tiling of `skinny_linear` runs it, or torch's own product where that is no slower. A shape that was not measured
runs on torch's.
"""

from __future__ import annotations

from kernels.triton.linear import SkinnyTiling

# (outputs, inputs, gated): ((rows, tiling up to them), ...), ascending. None: torch's own.
_Steps = tuple[tuple[int, SkinnyTiling | None], ...]

_WIDE = SkinnyTiling(64, 128, splits=1)
_IN_TWO = SkinnyTiling(64, 128, splits=2)
_IN_FOUR = SkinnyTiling(64, 128, splits=4)
_TALL = SkinnyTiling(128, 64, splits=1)
# In a forward of few rows: the next launch is let in two turns before a program's end, and asks for the first half
# kilobyte of its weight's rows meanwhile. From about thirty-two rows on it gains nothing.
_AHEAD_IN_TWO = SkinnyTiling(64, 128, splits=2, trigger=2, ahead=512)
_AHEAD_IN_FOUR = SkinnyTiling(64, 128, splits=4, trigger=1, ahead=512)
_SMALL = SkinnyTiling(16, 64, splits=1)
_SMALL_DEEP = SkinnyTiling(16, 128, splits=1, num_stages=5)

_MEASURED: dict[tuple[int, int, bool], _Steps] = {
    # Of an 8-billion-parameter Llama: query, key and value; attention's output; gate and up; down; logits.
    (6144, 4096, False): (
        (5, SkinnyTiling(128, 64, splits=3, trigger=2, ahead=512)),
        (16, _AHEAD_IN_TWO),
        (64, _WIDE),
    ),
    (4096, 4096, False): ((5, _AHEAD_IN_FOUR), (16, _AHEAD_IN_TWO), (64, _IN_TWO)),
    (28672, 4096, True): (
        (5, SkinnyTiling(128, 64, splits=1, num_warps=8, trigger=2, ahead=512)),
        (16, SkinnyTiling(64, 128, splits=1, trigger=4, ahead=512)),
        (64, _WIDE),
    ),
    (4096, 14336, False): ((16, _AHEAD_IN_FOUR), (64, _IN_TWO)),
    (128256, 4096, False): ((32, _WIDE), (64, _TALL)),
    # Of its EAGLE-3 head: the captured layers; query, key and value; logits.
    (4096, 12288, False): ((16, _IN_FOUR), (64, _IN_TWO)),
    (6144, 8192, False): ((16, _IN_TWO), (64, _WIDE)),
    (32000, 4096, False): ((32, _WIDE), (64, _TALL)),
    # Of SmolLM2.
    (960, 576, False): ((16, SkinnyTiling(16, 128, splits=2, num_stages=5)), (64, _SMALL)),
    (576, 576, False): ((64, _SMALL),),
    (3072, 576, True): ((16, _SMALL_DEEP),),
    (576, 1536, False): ((16, SkinnyTiling(16, 128, splits=4, num_stages=5)),),
    (49152, 576, False): ((64, _TALL),),
}


def measured() -> dict[tuple[int, int, bool], _Steps]:
    """All of it; a copy."""
    return dict(_MEASURED)


def choose_tiling(out_features: int, in_features: int, gated: bool) -> _Steps:
    """The steps for a weight [out_features, in_features] in bfloat16; empty: always torch's own."""
    return _MEASURED.get((out_features, in_features, gated), ())
