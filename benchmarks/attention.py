"""Which tiling runs attention fastest on this GPU?

The shapes of an 8-billion-parameter Llama (32 query heads, 8 KV heads of 128) and of SmolLM2 (9 and 3 of 64), bfloat16,
rows of one length over scattered blocks of 16: decode and verify rows, and chunks of prompts. For each: microseconds of
the kernel under the tiling that `choose_tiling` gives and under its neighbours, and the floor: bytes over the copy
bandwidth, or operations over a large product's rate. Prints a table, then one JSON object as the last line.

    python -m benchmarks.attention [--repeats N] [--only decode|prompt]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.kernels import COLD_BYTES, DEVICE, copy_bandwidth, graph_us, ints, product_rate, random, starts_of

CACHE_BLOCK = 16
MAX_LEN = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """rows of query_len tokens behind context_len."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    query_len: int
    context_len: int

    @property
    def label(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}: {self.rows} x {self.query_len} over {self.context_len}"


LLAMA, SMOLLM2 = (32, 8, 128), (9, 3, 64)
DECODE = [
    *(Case(*LLAMA, rows, 1, context) for rows, context in ((1, 500), (1, 2000), (1, 8000), (1, 64000))),
    *(Case(*LLAMA, rows, 1, context) for rows, context in ((16, 1000), (64, 500), (64, 2000), (64, 8000))),
    *(Case(*LLAMA, rows, 4, context) for rows, context in ((1, 500), (1, 2000), (16, 1000), (64, 500), (64, 2000))),
    *(Case(*SMOLLM2, rows, 1, context) for rows, context in ((1, 500), (32, 500), (64, 2000))),
    *(Case(*SMOLLM2, rows, 5, context) for rows, context in ((1, 500), (32, 500))),
]
PROMPT = [
    Case(*LLAMA, 1, 512, 0),
    Case(*LLAMA, 1, 2048, 0),
    Case(*LLAMA, 1, 8192, 0),
    Case(*LLAMA, 4, 512, 1500),
    Case(*LLAMA, 1, 2048, 30720),
    Case(*SMOLLM2, 1, 2048, 0),
]


def tilings(case: Case, chosen: Any) -> Iterator[tuple[str, Any]]:
    """(what differs, tiling), the chosen one first."""
    yield "chosen", chosen
    processors = chosen.num_programs // 3
    if case.query_len <= 16:
        # keys of a block, stages, programs of a multiprocessor
        for keys, stages, resident in ((64, 3, 2), (32, 3, 3), (32, 4, 4), (64, 2, 4), (128, 2, 2), (32, 3, 5)):
            changed = replace(
                chosen,
                block_keys=keys,
                num_stages=stages,
                num_programs=processors * resident,
                registers=min(255, 65536 // (128 * resident) // 8 * 8),
            )
            yield f"{keys} keys, s{stages}, x{resident}", changed
        for few, many in ((128, 256), (64, 128), (64, 512), (32, 1024)):
            yield f"at least {few} or {many}", replace(chosen, few_keys=few, many_keys=many)
        return
    for tile, keys, warps, stages, per_processor in (
        (128, 64, 8, 3, 1),
        (128, 64, 8, 2, 99999),
        (128, 64, 8, 4, 99999),
        (128, 128, 8, 2, 99999),
        (128, 128, 8, 3, 99999),
        (64, 64, 4, 2, 99999),
        (64, 64, 4, 3, 99999),
        (64, 128, 4, 2, 99999),
    ):
        changed = replace(
            chosen,
            long_tile=tile,
            long_keys=keys,
            long_warps=warps,
            long_stages=stages,
            long_programs=processors * per_processor,
        )
        yield f"{tile}x{keys}, {warps} warps, s{stages}, x{per_processor}", changed


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Microseconds by tiling."""
    from kernels.triton.attention import attend, choose_tiling

    seq_len, tokens = case.context_len + case.query_len, case.rows * case.query_len
    width = -(-seq_len // CACHE_BLOCK)
    copies = max(1, min(32, COLD_BYTES // kv_bytes(case)))
    inputs = []
    for _ in range(copies):
        caches = random(2, case.rows * width, CACHE_BLOCK, case.kv_heads, case.head_dim)
        tables = torch.randperm(case.rows * width, device=DEVICE).to(torch.int32).view(case.rows, width)
        q = random(tokens, case.heads, case.head_dim)
        lens = ints([seq_len] * case.rows)
        inputs.append((q, caches[0], caches[1], starts_of(case.rows, case.query_len), lens, tables))
    chosen = choose_tiling(torch.device(DEVICE), case.kv_heads, case.head_dim, 2)
    times = {}
    for label, tiling in tilings(case, chosen):
        calls = [
            partial(attend, *given, case.head_dim**-0.5, None, case.query_len, MAX_LEN, tiling) for given in inputs
        ]
        times[label] = graph_us(calls, repeats)
    return times


def kv_bytes(case: Case) -> int:
    """Keys, values, queries and results."""
    seq_len = case.context_len + case.query_len
    return 4 * case.head_dim * case.rows * (seq_len * case.kv_heads + case.query_len * case.heads)


def num_flops(case: Case) -> float:
    seen = case.query_len * case.context_len + case.query_len * (case.query_len + 1) // 2
    return 4.0 * case.rows * seen * case.heads * case.head_dim


def main() -> None:
    """Measure every case and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="decode,prompt")
    options = parser.parse_args()
    missing = "no CUDA device" if not torch.cuda.is_available() else "" if find_spec("triton") else "no package triton"
    if missing:
        print(f"Nothing measured: these are kernels of a GPU, and there is {missing} here.")
        print(json.dumps({"device": None, "cases": {}}))
        return
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth, rate = copy_bandwidth(options.repeats), product_rate(options.repeats)
    name = torch.cuda.get_device_name()
    print(f"{name}: copies move {bandwidth / 1e6:.2f} TB/s, products make {rate / 1e6:.0f} TFLOP/s")
    results: dict[str, dict[str, float]] = {}
    for kind, cases in (("decode", DECODE), ("prompt", PROMPT)):
        for case in cases if kind in options.only else ():
            times = measure(case, options.repeats)
            floor = max(kv_bytes(case) / bandwidth, num_flops(case) / rate)
            results[case.label] = {label: round(time, 2) for label, time in times.items()} | {"floor": round(floor, 2)}
            ranked = sorted(times, key=lambda label: times[label])
            others = "; ".join(f"{label}: {times[label]:.1f}" for label in ranked[:5])
            print(f"{case.label:36} floor {floor:8.1f}  chosen {times['chosen']:8.1f}  {others}", flush=True)
            torch.cuda.empty_cache()
    print(json.dumps({"device": name, "cases": results}))


if __name__ == "__main__":
    main()
