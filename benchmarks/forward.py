"""What does a decoder's forward cost on this GPU, beside the memory it must read, and what is each trick worth?

Dummy weights in bfloat16, rows of one length behind a context, attention by Triton, forward and logits replayed from
one CUDA graph: no host time counts. Variants: torch's own products, the chosen kernels, and neighbours of those.
`floor` is the bytes of the weights and of the KV over the copy bandwidth. Prints a table, then one JSON object as the
last line.

    python -m benchmarks.forward [--model DIR] [--steps 1x1,1x4,16x4] [--context N] [--variants all|chosen] [--profile]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import COLD_BYTES, DEVICE, copy_bandwidth, graph_us, ints, longs, starts_of
from engine.decoder import Decoder
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """choice: what `linear_choice` says, or `torch`: none of it. change: of each tiling. overlap: launches overlap."""

    name: str
    choice: str = "chosen"
    change: Callable[[tuple[int, int, bool], Any], Any] | None = None
    overlap: bool = True


def fewer_stages(gated_only: bool, num_stages: int) -> Callable[[tuple[int, int, bool], Any], Any]:
    def change(shape: tuple[int, int, bool], tiling: Any) -> Any:
        return replace(tiling, num_stages=num_stages) if shape[2] or not gated_only else tiling

    return change


def launched(trigger: int | None, ahead: int) -> Callable[[tuple[int, int, bool], Any], Any]:
    return lambda shape, tiling: replace(tiling, trigger=trigger, ahead=ahead)


VARIANTS = [
    Variant("torch's products, one after the other", choice="torch", overlap=False),
    Variant("torch's products", choice="torch"),
    Variant("chosen, one after the other", overlap=False),
    Variant("chosen"),
    Variant("gate and up in 3 stages", change=fewer_stages(True, 3)),
    Variant("all in 3 stages", change=fewer_stages(False, 3)),
    Variant("next at the start", change=launched(None, 0)),
    Variant("next 2 turns early", change=launched(2, 0)),
    Variant("that, 512 bytes ahead", change=launched(2, 512)),
]


@contextmanager
def applied(variant: Variant, decoder: Decoder) -> Iterator[None]:
    """Run the decoder under a variant. Reaches into the engine: nothing but this measurement needs to change it."""
    from kernels.triton import linear_choice, overlap

    measured = linear_choice.measured()
    changed: dict[tuple[int, int, bool], Any] = {}
    for shape, steps in measured.items() if variant.choice != "torch" else ():
        changed[shape] = tuple(
            (rows, tiling if tiling is None or variant.change is None else variant.change(shape, tiling))
            for rows, tiling in steps
        )
    linear_choice._MEASURED.clear()
    linear_choice._MEASURED.update(changed)
    os.environ[overlap.SWITCH] = "1" if variant.overlap else "0"
    try:
        for layer in decoder.layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                product.choose()
        decoder._lm_head.choose()
        yield
    finally:
        linear_choice._MEASURED.clear()
        linear_choice._MEASURED.update(measured)
        os.environ.pop(overlap.SWITCH)


def make_step(decoder: Decoder, rows: int, query_len: int, context_len: int) -> Callable[[], object]:
    """Forward and logits of one step over scattered blocks."""
    config = decoder.config
    seq_len, tokens = context_len + query_len, rows * query_len
    width = -(-seq_len // BLOCK_SIZE)
    kv = decoder.make_kv_cache(rows * width + 1, BLOCK_SIZE)
    for layer in range(config.num_layers):
        kv.k(layer).normal_()
        kv.v(layer).normal_()
    tables = (torch.randperm(rows * width, device=DEVICE) + 1).to(torch.int32).view(rows, width)
    positions = (torch.arange(tokens, device=DEVICE) % query_len + context_len).to(torch.int64)
    row_of = torch.arange(tokens, device=DEVICE) // query_len
    slots = tables[row_of, positions // BLOCK_SIZE].to(torch.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = AttentionMetadata(
        starts_of(rows, query_len), ints([seq_len] * rows), tables, slots, query_len, config.max_model_len
    )
    plans = [
        make_attention(
            *("triton", config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, group.window)
        ).plan(metadata)
        for group in decoder.groups
    ]
    ids = longs(range(tokens))

    def step() -> object:
        return decoder.logits(decoder.forward(ids, positions, plans, kv).hidden)

    return step


def weight_bytes(decoder: Decoder) -> int:
    """Of everything that a step reads whole."""
    products = [product for layer in decoder.layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return 2 * sum(product.out_features * product.in_features for product in [*products, decoder._lm_head])


def profile(step: Callable[[], object]) -> None:
    """Print what each kernel of a layer takes in a replayed graph, and how long the device idles before it: the mean
    over the layers, in the order of their launches.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    # A layer goes from one write of the KV to the next.
    firsts = [index for index, event in enumerate(events) if "rope_kv_write" in event.name]
    layers = [events[first:last] for first, last in itertools.pairwise(firsts)]
    layers = [layer for layer in layers if len(layer) == len(layers[0])]
    for place in range(len(layers[0])):
        took = statistics.mean(layer[place].time_range.elapsed_us() for layer in layers)
        idle = 0.0
        if place:
            idle = statistics.mean(layer[place].time_range.start - layer[place - 1].time_range.end for layer in layers)
        print(f"        {layers[0][place].name[:60]:60} {took:7.2f} us, {idle:6.2f} us after the one before")


def main() -> None:
    """Measure every variant and step, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "configs/shapes/llama-3-8b"))
    parser.add_argument("--steps", default="1x1,1x4,16x1,16x4,64x1,64x4", help="rows x query tokens")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--variants", default="all", choices=("all", "chosen"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="a layer's kernels too, one by one")
    options = parser.parse_args()
    missing = "no CUDA device" if not torch.cuda.is_available() else "" if find_spec("triton") else "no package triton"
    if missing:
        print(f"Nothing measured: this is about a GPU, and there is {missing} here.")
        print(json.dumps({"device": None, "steps": {}}))
        return
    bandwidth = copy_bandwidth(options.repeats)
    device = torch.cuda.get_device_name()
    print(f"{device}: copies move {bandwidth / 1e6:.2f} TB/s; {options.model}")
    variants = VARIANTS if options.variants == "all" else [variant for variant in VARIANTS if variant.name == "chosen"]
    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        decoder = Decoder.load(options.model, torch.bfloat16, DEVICE, load_format="dummy")
        config = decoder.config
        # A model that fits the cache is measured from there, as it runs.
        cold = weight_bytes(decoder) > COLD_BYTES
        for index, label in enumerate(options.steps.split(",")):
            rows, query_len = (int(number) for number in label.split("x"))
            kv_bytes = 4 * rows * (options.context + query_len) * config.num_kv_heads * config.head_dim
            floor = (weight_bytes(decoder) + kv_bytes * config.num_layers) / bandwidth
            step = make_step(decoder, rows, query_len, options.context)
            print(f"{label} behind {options.context}: floor {floor:.0f} us{'' if cold else ' (weights fit the cache)'}")
            results[label] = {"floor": round(floor, 1)}
            expected: torch.Tensor | None = None
            times: dict[str, list[float]] = {variant.name: [] for variant in variants}
            off: dict[str, float] = {}
            # Twice, and not in a row: a GPU that has just begun is cooler, and faster.
            for turn in range(2):
                for variant in variants:
                    with applied(variant, decoder):
                        logits = step()
                        assert isinstance(logits, torch.Tensor)
                        times[variant.name].append(graph_us([step], options.repeats))
                        shown = variant.name == "chosen" or (index < 2 and variant.name.startswith("torch's products"))
                        if options.profile and turn == 1 and shown:
                            print(f"    {variant.name}:")
                            profile(step)
                    expected = logits if expected is None else expected
                    off[variant.name] = float((logits - expected).norm() / expected.norm())
            for name, pair in times.items():
                results[label][name] = round(min(pair), 1)
                both = ", ".join(f"{time:.1f}" for time in pair)
                print(
                    f"    {name:34}{both:>18} us {min(pair) / floor:7.3f} x floor  off by {off[name]:.1e}", flush=True
                )
            torch.cuda.empty_cache()
    print(json.dumps({"device": device, "model": options.model, "context": options.context, "steps": results}))


if __name__ == "__main__":
    main()
