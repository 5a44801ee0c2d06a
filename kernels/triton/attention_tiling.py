"""How is paged attention cut into programs? By hand, from the device and the layer; nothing is searched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# A block of keys is on its way while the one before is worked on.
NUM_STAGES = 3


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut.

    block_keys: keys of one turn of the inner loop. few_keys, many_keys: the least keys of a stretch where rows are few,
    and where they are many; max_splits: the most stretches of a row. num_programs: as many as the device holds;
    registers: of a thread, at most, so that it holds them. num_stages: of the inner loop's pipeline. long_*: of long
    rows, and long_tile: query tokens times heads of a tile, a power of two.
    """

    block_keys: int
    few_keys: int
    many_keys: int
    max_splits: int
    num_programs: int
    registers: int
    num_stages: int
    long_tile: int
    long_keys: int
    long_programs: int
    long_stages: int
    long_warps: int

    def splits_of(self, num_rows: int) -> int:
        """The most stretches of a row in a batch of num_rows: scratch is made for all of them."""
        return min(self.max_splits, max(8, 256 // num_rows))


@lru_cache(maxsize=64)
def choose_tiling(device: torch.device, num_kv_heads: int, head_dim: int, itemsize: int) -> Tiling:
    """By hand, from measurements (`benchmarks.attention`). itemsize: bytes of an element of q."""
    multiprocessors = 4
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    # Tiles in float32, or of wide heads, take twice the registers and the shared memory.
    heavy = itemsize * head_dim > 2 * 128
    return Tiling(
        block_keys=32 if heavy else 64,
        few_keys=64,
        many_keys=256,
        max_splits=64,
        num_programs=3 * multiprocessors,
        registers=168,
        num_stages=NUM_STAGES,
        long_tile=64 if heavy else 128,
        long_keys=32 if heavy else 64,
        # One tile each: the device hands them out as programs end, which evens out what the tiles' lengths do not.
        long_programs=1 << 20,
        long_stages=NUM_STAGES,
        long_warps=8,
    )
