"""What does attention cost a forward on this CPU, beside the naive way and beside the dense layers?

SmolLM2-135M's shape: 30 layers, 9 query heads and 3 KV heads of 64, blocks of 16. Each figure is the attention of one
whole forward (one plan, 30 runs), the median over repeats, in milliseconds. `naive` gathers the blocks, repeats the
KV heads and calls scaled_dot_product_attention row by row. `gathered` is our backend on rows whose blocks lie
scattered over the cache; `run` on rows whose blocks are one run. Prints a table, then one JSON object as the last
line.

    python benchmarks/attention_cpu.py [--threads N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kernels import layout
from kernels.attention.interface import AttentionMetadata
from kernels.attention.torch_backend import TorchAttention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
# One forward of one token through the dense layers of the same model, on two AVX2 cores.
DENSE_MS = 55.0

MIXED = [33, 64, 120, 200, 256, 300, 411, 512, 600, 700, 801, 900, 1000, 128, 64, 16]
CASES: dict[str, tuple[list[int], list[int]]] = {
    "decode, context 128": ([128], [1]),
    "decode, context 256": ([256], [1]),
    "decode, context 1024": ([1024], [1]),
    "decode, context 4096": ([4096], [1]),
    "verify 5 tokens, context 256": ([256], [5]),
    "verify 5 tokens, context 1024": ([1024], [5]),
    "16 decode rows, mixed contexts": (MIXED, [1] * 16),
    "prefill 256 on 1000": ([1000], [256]),
    "prefill 512 on 0": ([0], [512]),
}


def make_metadata(context_lens: list[int], query_lens: list[int], scattered: bool) -> tuple[AttentionMetadata, int]:
    """A step's metadata, and how many blocks its cache needs."""
    context, query = np.array(context_lens, np.int32), np.array(query_lens, np.int32)
    seq_lens = context + query
    needed = [layout.blocks_needed(int(length), BLOCK_SIZE) for length in seq_lens]
    ids = np.arange(1, sum(needed) + 1, dtype=np.int32)
    if scattered:
        ids = np.random.default_rng(0).permutation(ids)
    tables = np.zeros((len(needed), max(needed)), np.int32)
    begin = 0
    for row, count in enumerate(needed):
        tables[row, :count] = ids[begin : begin + count]
        begin += count
    starts = layout.make_query_start_loc(query)
    positions = layout.make_positions(context, query)
    slots = layout.make_slot_mapping(tables, positions, starts, BLOCK_SIZE, 1 << 30, int(starts[-1]))
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots),
        max_query_len=int(query.max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_np=starts,
        seq_lens_np=seq_lens,
    )
    return metadata, begin + 1


def naive(
    metadata: AttentionMetadata,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Gather, repeat the KV heads, attend under a full mask; every row, every layer."""
    k_cache.view(-1, KV_HEADS, HEAD_DIM)[metadata.slot_mapping] = k
    v_cache.view(-1, KV_HEADS, HEAD_DIM)[metadata.slot_mapping] = v
    out = torch.empty_like(q)
    starts = metadata.query_start_loc.tolist()
    for row, length in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        blocks = metadata.block_tables[row, : layout.blocks_needed(length, BLOCK_SIZE)].long()
        keys = k_cache[blocks].view(-1, KV_HEADS, HEAD_DIM)[:length].repeat_interleave(HEADS // KV_HEADS, dim=1)
        values = v_cache[blocks].view(-1, KV_HEADS, HEAD_DIM)[:length].repeat_interleave(HEADS // KV_HEADS, dim=1)
        seen = torch.arange(length)[None, :] <= torch.arange(length - (last - first), length)[:, None]
        out[first:last] = torch.nn.functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=seen
        ).transpose(0, 1)
    return out


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of `call` in milliseconds, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def measure(context_lens: list[int], query_lens: list[int], repeats: int) -> dict[str, float]:
    """One case's figures."""
    backend = TorchAttention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, None)
    tokens = sum(query_lens)
    q = torch.randn(tokens, HEADS, HEAD_DIM)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)

    def ours(metadata: AttentionMetadata, caches: torch.Tensor) -> None:
        plan = backend.plan(metadata)
        for layer in range(LAYERS):
            plan.run(q, k, v, caches[layer, 0], caches[layer, 1])

    def plain(metadata: AttentionMetadata, caches: torch.Tensor) -> None:
        for layer in range(LAYERS):
            naive(metadata, q, k, v, caches[layer, 0], caches[layer, 1])

    figures: dict[str, float] = {}
    for label, scattered in (("run", False), ("gathered", True)):
        metadata, num_blocks = make_metadata(context_lens, query_lens, scattered)
        caches = torch.randn(LAYERS, 2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        figures[label] = median_ms(partial(ours, metadata, caches), repeats)
        if scattered:
            figures["naive"] = median_ms(partial(plain, metadata, caches), max(3, repeats // 5))
    figures["naive / run"] = figures["naive"] / figures["run"]
    figures["run / dense token"] = figures["run"] / DENSE_MS
    return {label: round(value, 3) for label, value in figures.items()}


def main() -> None:
    """Measure every case and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {name: measure(*case, options.repeats) for name, case in CASES.items()}
    columns = ["run", "gathered", "naive", "naive / run", "run / dense token"]
    print(f"{'ms per forward, ' + str(options.threads) + ' thread(s)':34}" + "".join(f"{c:>19}" for c in columns))
    for name, row in results.items():
        print(f"{name:34}" + "".join(f"{row[column]:19.2f}" for column in columns))
    print(json.dumps({"threads": options.threads, "layers": LAYERS, "dense_ms_per_token": DENSE_MS, "cases": results}))


if __name__ == "__main__":
    main()
