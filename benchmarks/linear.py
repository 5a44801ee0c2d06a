"""Which form runs a linear layer of few rows fastest on this GPU?

For the weights of an 8-billion-parameter Llama, of its EAGLE-3 head and of SmolLM2, in bfloat16, with 1 to 64 rows: the
microseconds of torch's own product and of every tiling of `skinny_linear` worth trying, each replayed from a CUDA graph
over enough copies of the weight that none is found in the L2 cache. `GB/s` is the weight's bytes over the best time.
Gated shapes count `silu_mul` in. Prints a table, then one JSON object as the last line; with --choice, first the lines
of `kernels/triton/linear_choice.py` that the figures speak for.

    python -m benchmarks.linear [--repeats N] [--shapes llama,head,smollm2] [--rows 1,2,4] [--choice]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.kernels import COLD_BYTES, DEVICE, copy_bandwidth, graph_us

# name: (outputs, inputs, gated)
Shape = tuple[int, int, bool]
SHAPES: dict[str, dict[str, Shape]] = {
    "llama": {
        "qkv": (6144, 4096, False),
        "out": (4096, 4096, False),
        "gate_up": (28672, 4096, True),
        "down": (4096, 14336, False),
        "lm_head": (128256, 4096, False),
    },
    "head": {
        "fc": (4096, 12288, False),
        "qkv": (6144, 8192, False),
        "lm_head": (32000, 4096, False),
    },
    "smollm2": {
        "qkv": (960, 576, False),
        "out": (576, 576, False),
        "gate_up": (3072, 576, True),
        "down": (576, 1536, False),
        "lm_head": (49152, 576, False),
    },
}
ROWS = (1, 2, 4, 5, 8, 16, 32, 64)
# A tiling is taken over torch's own product only where it saves more than this share: less is noise.
LEAST_GAIN = 0.03
# Programs that share a weight: about so many keep the memory of a large GPU busy, and more have nothing to do.
FEWEST_PROGRAMS, MOST_PROGRAMS = 96, 2100


def tilings(shape: Shape, rows: int) -> list[Any]:
    """The tilings worth a try, of the kernel's SkinnyTiling."""
    from kernels.triton.linear import SkinnyTiling

    size_out, size_in, gated = shape
    outs = size_out // 2 if gated else size_out
    found: list[Any] = []
    for block_out, block_in, num_stages in (
        (64, 64, 5),
        (64, 128, 4),
        (32, 128, 4),
        (16, 128, 5),
        (16, 256, 3),
        (128, 64, 4),
    ):
        if gated and block_out == 128:
            continue
        if rows > 16 and (block_out < 64 or block_in == 256):
            continue
        for splits in (1, 2, 4, 8):
            programs = -(-outs // block_out) * splits
            small = size_in // splits < 2 * block_in
            fits = FEWEST_PROGRAMS <= programs <= MOST_PROGRAMS
            if (fits and not small) or (splits == 1 and programs > MOST_PROGRAMS and block_out >= 64):
                found.append(SkinnyTiling(block_out, block_in, splits, 4, num_stages))
    return found or [SkinnyTiling(16, 64, 1, 4, 4)]


def calls_of(shape: Shape, rows: int, tiling: Any, weights: list[torch.Tensor]) -> list[Callable[[], object]]:
    """One call for each copy of the weight. tiling None: torch's own product."""
    from kernels.triton.activation import silu_mul
    from kernels.triton.linear import num_counters, skinny_linear

    size_out, size_in, gated = shape
    x = torch.randn((rows, size_in), device=DEVICE).to(torch.bfloat16)
    if tiling is None:
        own: Callable[..., torch.Tensor] = torch.nn.functional.linear
        if gated:
            return [lambda weight=weight: silu_mul(own(x, weight)) for weight in weights]  # type: ignore[misc]
        return [partial(own, x, weight) for weight in weights]
    counters = torch.zeros(num_counters(size_out, gated, tiling), dtype=torch.int32, device=DEVICE)
    return [partial(skinny_linear, x, weight, None, tiling, counters, gated) for weight in weights]


def label(tiling: Any) -> str:
    if tiling is None:
        return "torch"
    return f"{tiling.block_out}x{tiling.block_in}/{tiling.splits} s{tiling.num_stages}"


def measure(shape: Shape, rows: int, weights: list[torch.Tensor], repeats: int) -> dict[Any, float]:
    """Microseconds by tiling (None: torch's). One that gives another result than torch's is a fault, and raises."""
    times: dict[Any, float] = {}
    for tiling in [None, *tilings(shape, rows)]:
        calls = calls_of(shape, rows, tiling, weights)
        times[tiling] = graph_us(calls, repeats)
    return times


def choice_lines(shape: Shape, best: dict[int, Any]) -> str:
    """The entry of linear_choice.py: neighbouring row counts of one tiling share a step."""
    steps: list[tuple[int, Any]] = []
    for rows, tiling in sorted(best.items()):
        if steps and steps[-1][1] == tiling:
            steps[-1] = (rows, tiling)
        else:
            steps.append((rows, tiling))
    while steps and steps[-1][1] is None:
        steps.pop()
    inner = "".join(
        f"\n        ({rows}, {tiling}),".replace("SkinnyTiling(", "SkinnyTiling(") for rows, tiling in steps
    )
    return f"    {shape}: ({inner}\n    )," if steps else f"    # {shape}: torch's own"


def main() -> None:
    """Measure every shape and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(str(rows) for rows in ROWS))
    parser.add_argument("--choice", action="store_true")
    options = parser.parse_args()
    missing = "no CUDA device" if not torch.cuda.is_available() else "" if find_spec("triton") else "no package triton"
    if missing:
        print(f"Nothing measured: these are kernels of a GPU, and there is {missing} here.")
        print(json.dumps({"device": None, "shapes": {}}))
        return
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = copy_bandwidth(options.repeats)
    print(f"{torch.cuda.get_device_name()}: copies move {bandwidth / 1e6:.2f} TB/s")
    print(f"{'shape':34}{'rows':>5}{'torch us':>10}{'best us':>9}{'GB/s':>7}  best, then the others")
    results: dict[str, dict[str, float]] = {}
    lines: list[str] = []
    for model in options.shapes.split(","):
        for name, shape in SHAPES[model].items():
            size_out, size_in, gated = shape
            num_bytes = size_out * size_in * 2
            copies = max(1, min(64, COLD_BYTES // num_bytes + 1))
            weights = [
                torch.empty((size_out, size_in), dtype=torch.bfloat16, device=DEVICE).normal_(std=size_in**-0.5)
                for _ in range(copies)
            ]
            best: dict[int, Any] = {}
            for rows in (int(number) for number in options.rows.split(",")):
                times = measure(shape, rows, weights, options.repeats)
                ranked = sorted(times, key=lambda tiling: times[tiling])
                best[rows] = ranked[0] if times[ranked[0]] < (1 - LEAST_GAIN) * times[None] else None
                shown = "  ".join(f"{label(tiling)} {times[tiling]:.1f}" for tiling in ranked[:6])
                title = f"{model} {name} {size_in}->{size_out}{' gated' if gated else ''}"
                rate = num_bytes / times[ranked[0]] / 1e3
                print(f"{title:34}{rows:5}{times[None]:10.1f}{times[ranked[0]]:9.1f}{rate:7.0f}  {shown}", flush=True)
                results[f"{title}, {rows} rows"] = {label(tiling): round(times[tiling], 2) for tiling in ranked}
            lines.append(choice_lines(shape, best))
            del weights
            torch.cuda.empty_cache()
    if options.choice:
        print("\n".join(lines))
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "copy_tb_per_s": round(bandwidth / 1e6, 3), "shapes": results}))


if __name__ == "__main__":
    main()
