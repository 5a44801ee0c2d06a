"""How level are the ranks of a sharded target, what do their collectives cost, and what would several GPUs gain?

    python -m benchmarks.pcp [--sizes 2 4] [--tokens 64 512] [--rounds 5] [--model-config DIR]

Three tables, then one JSON object as the last line. Imbalance (largest over mean) of the deal, for steps as they come
in serving, by the shape of an 8B model. Here and now: a small decoder over gloo, ranks as processes of this CPU: a
step, of it rank 0 in collectives, and an order's way to another rank. And a model of an 8B step on one node of H200s,
every figure it rests on printed with it; `benchmarks.pcp_steps` measures the same steps on real GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.channel.memory import ExportedMemory
from engine.decoder import Decoder
from engine.model_config import ModelConfig
from kernels.attention.torch_backend import TorchAttention
from kernels.sharding import StepShards, shard_step
from target_service.model import LoadedModel, token_work
from target_service.pcp.board import Board
from target_service.pcp.forward import RankForward
from target_service.pcp.group import TorchGroup, rendezvous
from target_service.pcp.order import StepOrder, most_bytes

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "configs/shapes/llama-3-8b"
BLOCK_SIZE = 16
TIMEOUT_S = 120.0

Rows = list[tuple[int, int, bool]]  # context_len, query_len, is a prompt chunk


def mixes(seed: int = 7) -> dict[str, Rows]:
    """Steps as they come in serving: prompts in chunks, verify rows of 1 + 4 tokens, both."""
    source = random.Random(seed)

    def verify(num: int, longest: int) -> Rows:
        return [(source.randrange(200, longest), 5, False) for _ in range(num)]

    return {
        "one prompt of 4,096": [(0, 4096, True)],
        "one prompt of 65,536, last chunk of 16,384": [(49_152, 16_384, True)],
        "four prompts, 500 to 3,000": [(0, source.randrange(500, 3000), True) for _ in range(4)],
        "16 verify rows, contexts to 8,000": verify(16, 8000),
        "64 verify rows, contexts to 32,000": verify(64, 32_000),
        "256 verify rows, contexts to 8,000": verify(256, 8000),
        "a chunk of 2,048 and 32 verify rows": [(4096, 2048, True), *verify(32, 8000)],
        "one verify row": verify(1, 8000),
    }


def deal(rows: Rows, num_ranks: int, work: int) -> StepShards:
    """The step over ranks."""
    contexts, lens, splits = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
    return shard_step(contexts, lens, splits, num_ranks, work)


def imbalances(sizes: list[int], work: int) -> dict[str, Any]:
    """By mix and number of ranks: largest over mean, and what the deal itself costs."""
    found: dict[str, Any] = {}
    for name, rows in mixes().items():
        found[name] = {}
        for size in sizes:
            times = []
            for _ in range(5):
                began = time.perf_counter()
                shards = deal(rows, size, work)
                times.append(time.perf_counter() - began)
            found[name][str(size)] = {
                "tokens": round(shards.token_imbalance, 3),
                "work": round(shards.work_imbalance, 3),
                "deal_us": round(min(times) * 1e6),
            }
    return found


# --- here and now: gloo ---


def small_decoder() -> Decoder:
    """Large enough that products weigh more than calls, small enough for a shared CPU."""
    config = ModelConfig.from_directory(SHAPE)
    small = replace(
        config,
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=512,
        windows=(None,) * 4,
    )
    return Decoder.random(small)


def step_order(num_tokens: int) -> StepOrder:
    """One prompt of so many tokens; its last token wants logits."""
    return StepOrder(
        context_lens=np.zeros(1, dtype=np.int64),
        query_lens=np.array([num_tokens]),
        num_logits=np.ones(1, dtype=np.int64),
        splits=np.ones(1, dtype=np.bool_),
        input_ids=np.arange(num_tokens, dtype=np.int64) % 500,
        block_tables=np.arange(1, 1 + -(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None],
        hidden_layers=(),
    )


def run_rank(
    rank: int, size: int, port: int, tokens: list[int], rounds: int, results: SimpleQueue[dict[str, Any]]
) -> None:
    """One rank's process: times `rounds` steps of each size; rank 0 reports."""
    torch.set_num_threads(1)
    decoder, device = small_decoder(), torch.device("cpu")
    group = TorchGroup(rank, size, "gloo", port, device, TIMEOUT_S, TIMEOUT_S)
    model = decoder.config
    backends = tuple(
        TorchAttention(model.num_heads, model.num_kv_heads, model.head_dim, model.attention_scale, kv_group.window)
        for kv_group in decoder.groups
    )
    kv = decoder.make_kv_cache(2 + max(tokens) // BLOCK_SIZE, BLOCK_SIZE)
    loaded = LoadedModel(decoder, kv, backends, max(tokens), token_work(model))
    forward = RankForward(loaded, backends, group)
    for num in tokens:
        order = step_order(num)
        times, inside = [], []
        for _ in range(rounds + 1):
            forward.take_collective_ms()
            began = time.perf_counter()
            forward.run(order)
            times.append((time.perf_counter() - began) * 1e3)
            inside.append(forward.take_collective_ms())
        if rank == 0:
            results.put(
                {
                    "ranks": size,
                    "tokens": num,
                    "step_ms": round(statistics.median(times[1:]), 2),
                    "collectives_ms_per_layer": round(statistics.median(inside[1:]) / model.num_layers, 3),
                }
            )
    group.close()


def measure_gloo(sizes: list[int], tokens: list[int], rounds: int) -> list[dict[str, Any]]:
    """Steps of the small decoder at every size."""
    context = multiprocessing.get_context("spawn")
    found = []
    for size in sizes:
        results: SimpleQueue[dict[str, Any]] = context.SimpleQueue()
        store = rendezvous(size, TIMEOUT_S)
        ranks = [
            context.Process(target=run_rank, args=(rank, size, store.port, tokens, rounds, results), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
            if process.exitcode != 0:
                raise SystemExit(f"a rank ended with {process.exitcode}")
        found += [results.get() for _ in tokens]
    return found


def echo(name: str, order_bytes: int, rounds: int) -> None:
    """The other end of `measure_hop`."""
    board = Board.attach(name, 2, order_bytes)
    for seq in range(1, rounds + 1):
        assert board.take(1, seq, TIMEOUT_S) is not None


def measure_hop(rounds: int = 200) -> dict[str, float]:
    """Microseconds from writing an order (64 rows of 4,096 tokens of context) until another process has it."""
    rows = 64
    order = replace(
        step_order(rows * 5),
        context_lens=np.full(rows, 4096, dtype=np.int64),
        query_lens=np.full(rows, 5, dtype=np.int64),
        num_logits=np.full(rows, 5, dtype=np.int64),
        splits=np.zeros(rows, dtype=np.bool_),
        block_tables=np.zeros((rows, 257), dtype=np.int32),
    )
    order_bytes = most_bytes(rows, rows * 5, 257, 0)
    memory = ExportedMemory(Board.num_bytes(2, order_bytes))
    board = Board(memory.buffer, 2, order_bytes)
    board.format()
    process = multiprocessing.get_context("spawn").Process(
        target=echo, args=(memory.name, order_bytes, rounds), daemon=True
    )
    process.start()
    times = []
    for seq in range(1, rounds + 1):
        began = time.perf_counter()
        board.publish(order, seq, TIMEOUT_S, lambda: False)
        while not board.taken(1, seq, TIMEOUT_S):
            pass
        if seq > rounds // 2:  # the first ones wait for the process
            times.append((time.perf_counter() - began) * 1e6)
        time.sleep(1e-3)  # as between two steps: the other end is asleep
    process.join(TIMEOUT_S)
    memory.close()
    return {"order_kib": round(order_bytes / 1024, 1), "p50_us": round(statistics.median(times), 1)}


# --- a node of H200s, on paper ---


@dataclass(frozen=True, slots=True)
class Node:
    """What the model rests on. NVLink 4: 18 links of 25 GB/s each way; a GPU sends and receives 450 GB/s at once."""

    product_tflops: float = 750.0  # bf16, dense; measured 769 to 798 for large products on one H200
    attention_tflops: float = 450.0  # of a flash-style prompt kernel
    memory_gbs: float = 4300.0  # measured by copies; 4,800 on paper
    nvlink_gbs: float = 450.0 * 0.8  # each way, four fifths of it reached by NCCL
    collective_us: float = 20.0  # start and end of a small NCCL all-gather on one host
    host_us_per_layer: float = 60.0  # launches of a layer without graphs, which is what several ranks run
    bytes_per_value: int = 2


def step_model(rows: Rows, num_ranks: int, model: ModelConfig, node: Node) -> dict[str, float]:
    """Milliseconds of a step, and of them in collectives that nothing hides.

    A layer on the fullest rank: products bound by arithmetic or by reading the weights; attention of pieces by
    arithmetic, of whole rows by reading their KV; the all-gather of K and V. Steps of whole rows alone hide the gather
    behind the rest of the layer; a prompt's attention waits for it.
    """
    shards = deal(rows, num_ranks, token_work(model))
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer_weights = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
    tokens = shards.padded_tokens
    products = max(
        2 * layer_weights * tokens / (node.product_tflops * 1e12),
        layer_weights * node.bytes_per_value / (node.memory_gbs * 1e9),
    )
    attention = 0.0
    for shard in shards.ranks:
        kv_bytes = int(shard.seq_lens.sum()) * 2 * kv_heads * node.bytes_per_value
        attention = max(
            attention,
            4 * shard.work * heads / (node.attention_tflops * 1e12),
            kv_bytes / (node.memory_gbs * 1e9),
        )
    compute = max(products + attention, node.host_us_per_layer * 1e-6)
    gather = 0.0
    if num_ranks > 1:
        received = (num_ranks - 1) * tokens * 2 * kv_heads * node.bytes_per_value
        gather = node.collective_us * 1e-6 + received / (node.nvlink_gbs * 1e9)
    has_pieces = any(shard.num_whole_tokens < shard.num_tokens for shard in shards.ranks)
    exposed = gather if has_pieces else max(0.0, gather - compute)
    logits = sum(1 if row[2] else row[1] for row in rows)
    head_weights = model.vocab_size * model.hidden_size
    head = max(
        2 * head_weights * logits / (node.product_tflops * 1e12),
        head_weights * node.bytes_per_value / (node.memory_gbs * 1e9),
    )
    ends = (node.collective_us * 1e-6 if num_ranks > 1 else 0.0) + head
    total = model.num_layers * (compute + exposed) + ends
    return {"ms": round(total * 1e3, 2), "collectives_ms": round(model.num_layers * exposed * 1e3, 2)}


def prompt_model(length: int, chunk: int, num_ranks: int, model: ModelConfig, node: Node) -> dict[str, float]:
    """A whole prompt, in chunks."""
    steps = [
        step_model([(start, min(chunk, length - start), True)], num_ranks, model, node)
        for start in range(0, length, chunk)
    ]
    return {name: round(sum(step[name] for step in steps), 2) for name in ("ms", "collectives_ms")}


def predictions(sizes: list[int], model: ModelConfig, node: Node) -> dict[str, Any]:
    """By step and number of ranks, with the speed-up over one."""
    cases: dict[str, dict[int, dict[str, float]]] = {}
    for length in (2048, 16_384, 65_536):
        cases[f"prompt of {length:,}"] = {size: prompt_model(length, 16_384, size, model, node) for size in [1, *sizes]}
    for num in (1, 16, 64, 256):
        rows: Rows = [(1024, 4, False)] * num
        cases[f"{num} verify rows"] = {size: step_model(rows, size, model, node) for size in [1, *sizes]}
    return {
        name: {str(size): {**found, "speed_up": round(by[1]["ms"] / found["ms"], 2)} for size, found in by.items()}
        for name, by in cases.items()
    }


def print_tables(result: dict[str, Any]) -> None:
    console = Console(width=110)
    table = Table("step", "ranks", "tokens", "work", "deal us", title="Imbalance: largest over mean")
    for name, by in result["imbalance"].items():
        for size, row in by.items():
            table.add_row(name, size, f"{row['tokens']:.3f}", f"{row['work']:.3f}", str(row["deal_us"]))
    console.print(table)
    table = Table("ranks", "tokens", "step ms", "in collectives, ms a layer", title="Small decoder over gloo, this CPU")
    for row in result["gloo"]:
        table.add_row(*(str(row[name]) for name in ("ranks", "tokens", "step_ms", "collectives_ms_per_layer")))
    console.print(table)
    hop = result["hop"]
    console.print(f"an order of {hop['order_kib']} KiB reaches another rank after {hop['p50_us']} us (median)")
    table = Table("step", "ranks", "ms", "in collectives", "x one rank", title="An 8B model on H200s, on paper")
    for name, by in result["model"].items():
        for size, row in by.items():
            table.add_row(name, size, f"{row['ms']:.2f}", f"{row['collectives_ms']:.2f}", f"{row['speed_up']:.2f}")
    console.print(table)
    console.print("it rests on:", ", ".join(f"{name} {value}" for name, value in result["node"].items()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="ranks, for the deal and the model")
    parser.add_argument("--gloo-sizes", type=int, nargs="*", default=[1, 2, 4], help="ranks, as processes here")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model-config", type=Path, default=SHAPE, help="directory with the config.json of the model")
    options = parser.parse_args()
    model, node = ModelConfig.from_directory(options.model_config), Node()
    result = {
        "imbalance": imbalances(options.sizes, token_work(model)),
        "gloo": measure_gloo(options.gloo_sizes, options.tokens, options.rounds),
        "hop": measure_hop(),
        "model": predictions(options.sizes, model, node),
        "node": asdict(node),
    }
    print_tables(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
