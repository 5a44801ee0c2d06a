"""What does each Triton kernel cost on this GPU, beside its reference and beside the memory it must move?

An 8-billion-parameter Llama's shapes (32 query heads, 8 KV heads of 128, hidden 4096, vocabulary 128256, blocks of 16),
bfloat16, at batch 1, 16 and 64 with rows of 1 and of 4 query tokens. `kernel` is replayed from a CUDA graph, so that no
host time counts, over enough copies of its inputs that none is found in the L2 cache; `reference` is the plain torch
kernel as it is called (of a long prompt's attention: torch's own flash attention over keys that lie in a row; of a
product: torch's). `floor` is the bytes that must move over the copy bandwidth measured first, or the operations over
the rate of a large product, whichever takes longer. Prints a table, then one JSON object as the last line. Needs a CUDA
device, and says so where there is none. `benchmarks.linear` measures the products shape by shape.

    python -m benchmarks.kernels [--repeats N] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, CACHE_BLOCK = 32, 8, 128, 4096, 14336, 128256, 16
BATCHES = (1, 16, 64)
DRAFT_LEN = 3
# Copies of a kernel's inputs come to this many bytes, four times an H200's L2 cache; never more copies than that.
COLD_BYTES, MAX_COPIES = 240 << 20, 64
DTYPE = torch.bfloat16
MAX_LEN = 1 << 15
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size. make() binds fresh inputs: (kernel, reference). num_bytes: what must move; num_flops:
    what must be computed on the matrix units.
    """

    name: str
    num_bytes: int
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]
    num_flops: float = 0.0


def graph_us(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median time of one of `calls`, in microseconds, all replayed one after the other from one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        # Not by `torch.cuda.graph`, which collects garbage first: a tenth of a second for each of hundreds of graphs.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    graph.replay()
    return median_us(graph.replay, repeats) / len(calls)


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call between two events of the stream, in microseconds."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def copy_bandwidth(repeats: int) -> float:
    """Bytes per microsecond, read and written, of a copy that no cache holds."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2.0 * source.numel() / median_us(partial(target.copy_, source), repeats)


def product_rate(repeats: int) -> float:
    """Floating-point operations per microsecond of a large product in bfloat16, of random numbers."""
    size = 8192
    left, right = random(size, size), random(size, size)
    torch.mm(left, right)
    return 2.0 * size**3 / median_us(partial(torch.mm, left, right), repeats)


def pair(name: str, function: str, arguments: tuple[Any, ...]) -> tuple[Callable[[], object], Callable[[], object]]:
    """(kernel, reference) of one name, bound to its arguments."""
    kernel, reference = (getattr(module(name, kind), function) for kind in ("triton", "reference"))
    return partial(kernel, *arguments), partial(reference, *arguments)


def module(name: str, kind: str) -> ModuleType:
    """kernels.<kind>.<name>, imported when a case is made."""
    return import_module(f"kernels.{kind}.{name}")


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def longs(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)


def starts_of(rows: int, query_len: int) -> torch.Tensor:
    return torch.arange(0, (rows + 1) * query_len, query_len, dtype=torch.int32, device=DEVICE)


def elementwise_cases(tokens: int) -> list[Case]:
    """The kernels between the matrix products of a layer."""
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM

    def norm() -> Any:
        return pair("norm", "rms_norm_residual", (random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN), 1e-5))

    def activation() -> Any:
        return pair("activation", "silu_mul", (random(tokens, 2 * INNER),))

    def rope_write() -> Any:
        q, k, v = random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cos, sin = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM)
        slots = torch.randperm(tokens * 16, device=DEVICE)[:tokens]
        caches = (random(tokens, 16, KV_HEADS, HEAD_DIM) for _ in range(2))
        return pair("rope_kv_write", "rope_kv_write", (q, k, v, cos, sin, slots, *caches))

    return [
        Case(f"rms_norm_residual, {tokens} tokens", tokens * HIDDEN * 2 * 4, norm),
        Case(f"silu_mul, {tokens} tokens", tokens * INNER * 2 * 3, activation),
        Case(f"rope_kv_write, {tokens} tokens", tokens * (2 * width + 2 * HEAD_DIM) * 2, rope_write),
    ]


def metadata_cases(rows: int) -> list[Case]:
    """The kernels that prepare a step."""
    query_len = DRAFT_LEN + 1
    tokens, width, groups = rows * query_len, MAX_LEN // CACHE_BLOCK, 3
    table = torch.randint(1, 9999, (rows, width), dtype=torch.int32, device=DEVICE)
    positions = (torch.arange(tokens, device=DEVICE) % query_len + 1000).to(torch.int64)
    starts, seats = starts_of(rows, query_len), torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def slots() -> Any:
        out = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
        return pair("slot_mapping", "compute_slot_mapping", (positions, starts, table, CACHE_BLOCK, MAX_LEN, out))

    def prefill() -> Any:
        outs = torch.empty(tokens, dtype=torch.int64, device=DEVICE), torch.empty_like(seats)
        anchors = longs(range(rows))
        return pair("prefill_inputs", "prepare_prefill_inputs", (positions, starts, seats * 0, anchors, anchors, *outs))

    def target() -> Any:
        outs = torch.empty((2, tokens), dtype=torch.int64, device=DEVICE)
        anchors, drafts = longs(range(rows)), torch.ones((rows, DRAFT_LEN), dtype=torch.int64, device=DEVICE)
        return pair(
            "target_inputs",
            "prepare_target_inputs",
            (seats + 1000, anchors, seats, positions, starts[:-1], drafts, starts, seats < 0, outs[0], outs[1]),
        )

    def commit() -> Any:
        state = seats + 1000, longs(range(rows))
        return pair(
            "target_inputs", "commit_verdict", (*state, seats, seats * 0 + 4, seats % 4, seats * 0 + 1, state[1])
        )

    def advance() -> Any:
        state = longs(range(rows)), seats + 1, longs(range(rows))
        return pair("advance", "advance_draft_step", (*state, table, CACHE_BLOCK, 1 << 40, None))

    def fill() -> Any:
        outs = (
            torch.empty(rows + 1, dtype=torch.int32, device=DEVICE),
            torch.empty((groups, rows), dtype=torch.int32, device=DEVICE),
            torch.empty((groups, rows, width), dtype=torch.int32, device=DEVICE),
            torch.empty((groups, tokens), dtype=torch.int64, device=DEVICE),
        )
        tables = table.expand(groups, rows, width).contiguous()
        sizes = [CACHE_BLOCK] * groups
        return pair(
            "metadata_fill", "fill_metadata", (seats, starts, seats + 1004, positions, tables, sizes, MAX_LEN, *outs)
        )

    return [
        Case(f"compute_slot_mapping, {rows} rows", tokens * 20, slots),
        Case(f"prepare_prefill_inputs, {rows} rows", tokens * 16 + rows * 24, prefill),
        Case(f"prepare_target_inputs, {rows} rows", tokens * 24 + rows * 24, target),
        Case(f"commit_verdict, {rows} rows", rows * 44, commit),
        Case(f"advance_draft_step, {rows} rows", rows * 44, advance),
        Case(f"fill_metadata of {groups} groups, {rows} rows", groups * (2 * table.numel() * 4 + tokens * 8), fill),
    ]


def sampling_cases(rows: int) -> list[Case]:
    """The kernels between the logits and the tokens; `rows` requests of DRAFT_LEN drafts each where they verify."""
    logit_rows = rows * (DRAFT_LEN + 1)
    index = torch.arange(logit_rows, device=DEVICE)
    one = torch.ones(logit_rows, device=DEVICE)
    starts = starts_of(rows, DRAFT_LEN + 1)
    drafts = torch.zeros((rows, DRAFT_LEN), dtype=torch.int64, device=DEVICE)
    some = (one[:rows], index[:rows], index[:rows], index[:rows] < 0)

    def logits(count: int) -> torch.Tensor:
        return random(count, VOCAB, dtype=torch.float32)

    def best() -> Any:
        scratch, out = torch.zeros((rows, 2), dtype=torch.int64, device=DEVICE), torch.empty_like(index[:rows])
        return pair("argmax", "argmax", (logits(rows), None, scratch, out))

    def sample() -> Any:
        return pair("sampling", "gumbel_sample", (logits(rows), one[:rows], index[:rows], index[:rows], 3))

    def filters() -> Any:
        top_k = ints([50] * rows)
        return pair("sampling", "filter_logits", (logits(rows), one[:rows], top_k, one[:rows] * 0.95, one[:rows] * 0))

    def greedy() -> Any:
        return pair("verify", "verify_greedy", (logits(logit_rows), starts, drafts))

    def match() -> Any:
        return pair("verify", "verify", (logits(logit_rows), starts, drafts, *some, None, None))

    def rejection() -> Any:
        probs = torch.softmax(random(rows, DRAFT_LEN, VOCAB, dtype=torch.float32), dim=-1)
        return pair("verify", "verify", (logits(logit_rows), starts, drafts, *some, probs, None))

    read = VOCAB * 4
    return [
        Case(f"argmax, {rows} rows", rows * read, best),
        Case(f"gumbel_sample, {rows} rows", rows * read, sample),
        Case(f"filter_logits (top-k and top-p), {rows} rows", 2 * rows * read, filters),
        Case(f"verify_greedy, {rows} rows", logit_rows * read, greedy),
        Case(f"verify by match, {rows} rows", logit_rows * read, match),
        Case(f"verify by rejection, {rows} rows", (logit_rows + rows * DRAFT_LEN) * read, rejection),
    ]


def attention_case(rows: int, query_len: int, context_len: int) -> Case:
    """Rows of one length over scattered blocks."""
    seq_len, tokens = context_len + query_len, rows * query_len
    width = -(-seq_len // CACHE_BLOCK)

    def make() -> Any:
        kernels, reference = module("attention", "triton"), module("attention", "reference")
        q = random(tokens, HEADS, HEAD_DIM)
        caches = random(2, rows * width, CACHE_BLOCK, KV_HEADS, HEAD_DIM)
        tables = torch.randperm(rows * width, device=DEVICE).to(torch.int32).view(rows, width)
        inputs = (q, caches[0], caches[1], starts_of(rows, query_len), ints([seq_len] * rows), tables, HEAD_DIM**-0.5)
        tiling = kernels.choose_tiling(q.device, KV_HEADS, HEAD_DIM, q.element_size())
        # A captured graph knows no better bound than the model's.
        kernel = partial(kernels.attend, *inputs, None, query_len, MAX_LEN, tiling)
        return kernel, partial(reference.paged_attention, *inputs, None)

    num_bytes = (rows * seq_len * KV_HEADS + tokens * HEADS) * HEAD_DIM * 2 * 2
    return Case(f"attention, {rows} x {query_len} over {context_len}", num_bytes, make)


def prompt_case(query_len: int, context_len: int) -> Case:
    """A chunk of a long prompt behind its context, beside torch's flash attention."""
    seq_len = context_len + query_len
    width = -(-seq_len // CACHE_BLOCK)

    def make() -> Any:
        kernels = module("attention", "triton")
        q = random(query_len, HEADS, HEAD_DIM)
        caches = random(2, width, CACHE_BLOCK, KV_HEADS, HEAD_DIM)
        tables = torch.randperm(width, device=DEVICE).to(torch.int32).view(1, width)
        inputs = (q, caches[0], caches[1], starts_of(1, query_len), ints([seq_len]), tables, HEAD_DIM**-0.5)
        tiling = kernels.choose_tiling(q.device, KV_HEADS, HEAD_DIM, q.element_size())
        own = q.transpose(0, 1)[None]
        keys, values = (
            cache.view(-1, KV_HEADS, HEAD_DIM)[:query_len].transpose(0, 1)[None].contiguous() for cache in caches
        )
        # Without a context, the same work; behind one, torch has no causal form: its own chunk only.
        dense = partial(
            torch.nn.functional.scaled_dot_product_attention, own, keys, values, is_causal=True, enable_gqa=True
        )
        return partial(kernels.attend, *inputs, None, query_len, MAX_LEN, tiling), dense

    num_bytes = (2 * seq_len * KV_HEADS + 2 * query_len * HEADS) * HEAD_DIM * 2
    seen = query_len * context_len + query_len * (query_len + 1) // 2
    return Case(f"prompt attention, {query_len} behind {context_len}", num_bytes, make, 4.0 * seen * HEADS * HEAD_DIM)


def product_case(name: str, size_out: int, size_in: int, gated: bool, rows: int) -> Case:
    """A linear layer as the engine runs it."""

    def make() -> Any:
        from engine.linear import PackedLinear

        x, layer = random(rows, size_in), PackedLinear(random(size_out, size_in) * size_in**-0.5)
        if gated:
            silu_mul = module("activation", "triton").silu_mul
            return partial(layer.silu_mul, x), lambda: silu_mul(torch.nn.functional.linear(x, layer.weight))
        return partial(layer, x), partial(torch.nn.functional.linear, x, layer.weight)

    num_bytes = (size_out * size_in + rows * (size_in + size_out)) * 2
    return Case(f"{name}, {rows} rows", num_bytes, make, 2.0 * rows * size_in * size_out)


def product_cases(rows: int) -> list[Case]:
    """A layer's four products, and the logits'."""
    return [
        product_case("qkv product", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False, rows),
        product_case("out product", HIDDEN, HEADS * HEAD_DIM, False, rows),
        product_case("gate_up product, silu_mul", 2 * INNER, HIDDEN, True, rows),
        product_case("down product", HIDDEN, INNER, False, rows),
        product_case("logits product", VOCAB, HIDDEN, False, rows),
    ]


def all_cases() -> list[Case]:
    """In the order of the table."""
    cases: list[Case] = []
    for rows in BATCHES:
        cases += metadata_cases(rows)
        cases += elementwise_cases(rows * (DRAFT_LEN + 1))
        cases += sampling_cases(rows)
        for context_len in (1024, 8192):
            cases += [attention_case(rows, query_len, context_len) for query_len in (1, DRAFT_LEN + 1)]
    for rows in (1, DRAFT_LEN + 1, 64):
        cases += product_cases(rows)
    prompts = [(512, 0), (2048, 0), (8192, 0), (2048, 6144), (2048, 30720)]
    return [*cases, *(prompt_case(*sizes) for sizes in prompts), *elementwise_cases(512)]


def measure(case: Case, bandwidth: float, rate: float, repeats: int) -> dict[str, float]:
    """Microseconds of kernel, reference and floor."""
    copies = max(1, min(MAX_COPIES, COLD_BYTES // max(1, case.num_bytes)))
    made = [case.make() for _ in range(copies)]
    kernel = graph_us([call for call, _ in made], repeats)
    reference = made[0][1]
    reference()
    figures = {
        "kernel": kernel,
        "reference": median_us(reference, max(3, repeats // 5)),
        "floor": max(case.num_bytes / bandwidth, case.num_flops / rate),
    }
    figures["kernel / floor"] = kernel / figures["floor"]
    figures["reference / kernel"] = figures["reference"] / kernel
    return {label: round(value, 3) for label, value in figures.items()}


def main() -> None:
    """Measure every case and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
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
    columns = ["kernel", "reference", "floor", "kernel / floor", "reference / kernel"]
    print(f"{name}: copies move {bandwidth / 1e6:.2f} TB/s, products make {rate / 1e6:.0f} TFLOP/s")
    print(f"{'microseconds':46}" + "".join(f"{column:>20}" for column in columns))
    results: dict[str, dict[str, float]] = {}
    for case in all_cases():
        if options.only not in case.name:
            continue
        results[case.name] = measure(case, bandwidth, rate, options.repeats)
        row = results[case.name]
        print(f"{case.name:46}" + "".join(f"{row[column]:20.2f}" for column in columns), flush=True)
        torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "device": name,
                "copy_tb_per_s": round(bandwidth / 1e6, 3),
                "tflop_per_s": round(rate / 1e6),
                "cases": results,
            }
        )
    )


if __name__ == "__main__":
    main()
