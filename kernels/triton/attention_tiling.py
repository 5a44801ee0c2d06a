"""How is paged attention cut into programs? By hand, from the device and the layer; nothing is searched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

# A key's address comes from a load itself, that of its block's id: Triton shares the stages out over the chain of
# loads, and with fewer than five the keys and values have one buffer each and wait for it.
NUM_STAGES = 5


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut.

    block_keys: keys of one turn of the inner loop. split_keys: the least keys of a stretch, a multiple of block_keys;
    max_splits: the most stretches of a row, so that long rows have longer ones. num_programs: as many as the device
    holds. num_stages: of the inner loop's pipeline. long_*: the same of long rows, and long_tile: query tokens times
    heads of a tile, a power of two.
    """

    block_keys: int
    split_keys: int
    max_splits: int
    num_programs: int
    num_stages: int
    long_tile: int
    long_keys: int
    long_programs: int
    long_stages: int
    long_warps: int


@lru_cache(maxsize=64)
def choose_tiling(device: torch.device, num_kv_heads: int, head_dim: int, itemsize: int) -> Tiling:
    """By hand, from the device's size: one row's stretches times its KV heads come to about one program per
    multiprocessor. itemsize: bytes of an element of q.
    """
    multiprocessors = 4
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = max(1, multiprocessors // num_kv_heads)
    # Tiles in float32, or of wide heads, take twice the registers and the shared memory.
    heavy = itemsize * head_dim > 2 * 128
    return Tiling(
        block_keys=32 if heavy else 64,
        split_keys=128,
        max_splits=min(64, max(8, 2 ** int(math.log2(splits)))),
        num_programs=3 * multiprocessors,
        num_stages=NUM_STAGES,
        long_tile=64 if heavy else 128,
        long_keys=32 if heavy else 64,
        long_programs=2 * multiprocessors,
        long_stages=NUM_STAGES,
        long_warps=8,
    )
