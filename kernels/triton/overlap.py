"""How do launches that follow one another overlap on a GPU?

A layer of few tokens is a row of kernels of a few microseconds each, and a GPU idles for half a microsecond and more
between two of them. With programmatic dependent launch (Hopper and later) a kernel is put on the GPU while the one
before it still runs, and waits there for its results, and its memory, in `gdc_wait`.

Before it waits it may only read what was complete when the last kernel of another kind before it began. The kernels of
this kind are those of a layer (norm, activation, rotation with the write of the KV, attention, products of few rows),
which write activations and KV; so weights may be read, and a step's lengths, tables and slots: between those who write
them and a layer stands at least one launched as ever (the embedding, the angles), which begins when all before it is
done. (The angles themselves may not: nothing need stand between them and the rotation.) Every kernel of this kind lets
the next one in at its very start and waits, in every program, before it reads or writes anything else; so when one is
done, all those before it are, as without overlapping, and results are the same, bit for bit.
`OUTRIDER_LAUNCH_OVERLAP=0` in the environment switches it off.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
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
