"""How do launches that follow one another overlap on a GPU?

A layer of few tokens is a row of kernels of a few microseconds each, and a GPU idles for half a microsecond and more
between two of them. With programmatic dependent launch (Hopper and later) a kernel is put on the GPU while the one
before it still runs, and waits there for its results, and its memory, in `gdc_wait`.

Before it waits it may only read what was complete when the last kernel of another kind before it began. The kernels of
this kind are those of a layer (norm, activation, rotation with the write of the KV, attention, products of few rows),
which write activations and KV; so weights may be read, and a step's lengths, tables and slots: between those who write
them and a layer stands at least one launched as ever (the embedding, the angles), which begins when all before it is
done. (The angles themselves may not: nothing need stand between them and the rotation.) Every kernel of this kind
waits, in every program, before it reads or writes anything else; so when one is done, all those before it are, as
without overlapping, and results are the same, bit for bit. `OUTRIDER_LAUNCH_OVERLAP=0` in the environment switches it
off.

Small kernels let the next one in at their very start. A product of few rows, which keeps the memory busy for as long as
it runs, does so shortly before its end: the next one then asks for the beginning of its own weight (`fetch_ahead`) just
when the memory would fall idle, through the last sums, the norm between them and its own start. Asked for earlier, it
comes at the expense of what is still being read, and nothing is gained (docs/LOG.md).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as gdc_wait

SWITCH = "OUTRIDER_LAUNCH_OVERLAP"


@lru_cache(maxsize=64)
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that has the constant OVERLAP."""
    if _can_overlap(device) and os.environ.get(SWITCH, "1") != "0":
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def gdc_launch_if(condition):
    """`gdc_launch_dependents` where the scalar `condition` holds; may be called again and again."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred now;
            setp.ne.s32 now, $1, 0;
            @now griddepcontrol.launch_dependents;
            mov.b32 $0, 0;
        }
        """,
        "=r,r",
        [condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_ahead(ptrs, NUM_BYTES: tl.constexpr):
    """Ask for NUM_BYTES from each of `ptrs` on, to be brought into the L2 cache; returns at once. Both are multiples of
    16, and all of it lies in one allocation.
    """
    tl.inline_asm_elementwise(
        """
        cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        """,
        "=r,l,r",
        [ptrs.to(tl.int64), tl.full(ptrs.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
