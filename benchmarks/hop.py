"""How long does a signal take from one process's GPU work to the other's, through a `cuda_ipc` channel?

    python -m benchmarks.hop [--devices cuda:0 cuda:0] [--rounds 200] [--repeats 7]

Two processes. A round is: the target's stream publishes a step, the drafter's stream, which waits for it, publishes its
reply, the target's stream goes on. Everything is enqueued ahead of time, so no host is in the way; a hop is half a
round, timed on the target's stream. `empty`: nothing else on the streams. `with data`: the target writes the hidden
states of 64 rows of 4 tokens at an 8-billion-parameter size, the drafter copies them out and writes its drafts. On one
GPU both with a private MPS daemon and without. A table, then JSON; microseconds. `--devices simulated simulated` is a
dry run on threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shared_gpu import has_gpu, shared_gpu
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.interface import ChannelSpec
from tests.engine.channel.device_peer import make_driver

PATIENCE_S = 60.0
HEARTBEAT_S = 5.0
HEAD_START_CYCLES = 200_000_000  # a tenth of a second in which the host enqueues
NUM_ROWS, NUM_TOKENS, HIDDEN_WIDTH, DRAFT_LEN = 64, 256, 3 * 4096, 3


def make_spec(width: int) -> ChannelSpec:
    return ChannelSpec(
        channel_id="hop",
        epoch=1,
        depth=4,
        max_rows=NUM_ROWS,
        max_tokens=NUM_TOKENS,
        max_draft_len=DRAFT_LEN,
        hidden_width=width,
        hidden_dtype=torch.bfloat16,
        vocab_size=128256,
        max_blocks_per_row=8,
        block_size=16,
        num_blocks=64,
        draft_probs=False,
    )


def be_drafter(link: Connection, device: str) -> None:
    """The drafter's process: attaches, then enqueues as many answers as it is told to, until told to end."""
    driver, runner = make_driver(device)
    end = CudaIpcDrafterEnd(link.recv(), driver, HEARTBEAT_S)
    own = torch.zeros(NUM_TOKENS, max(1, end.spec.hidden_width), dtype=torch.bfloat16, device=driver.device)
    drafts = torch.ones(NUM_ROWS, DRAFT_LEN, dtype=torch.int64, device=driver.device)

    def work(seq: int) -> Callable[[], None]:
        hidden, tokens = end.ring(seq)[1].hidden, end.reply(seq).tokens

        def run() -> None:
            assert hidden is not None
            own.copy_(hidden)
            tokens.copy_(drafts)

        return run

    runner.run(lambda: None)
    link.send("attached")
    while (order := link.recv()) is not None:
        first, rounds, with_data = order
        link.send("enqueues")
        for seq in range(first, first + rounds):
            end.wait_entry(seq, PATIENCE_S)
            if with_data:
                runner.run(work(seq))
            end.publish_reply(seq)
        runner.synchronize(PATIENCE_S)
        link.send("done")
    end.close()
    end.wait_closed(PATIENCE_S)


def be_target(link: Connection, peer: Connection, device: str, rounds: int, repeats: int) -> None:
    """The target's process: leads, times, and reports microseconds per hop by kind of round."""
    driver, runner = make_driver(device)
    end = CudaIpcTargetEnd(make_spec(HIDDEN_WIDTH), driver, HEARTBEAT_S, PATIENCE_S)
    peer.send(end.describe())
    peer.recv()
    source = torch.ones(NUM_TOKENS, HIDDEN_WIDTH, dtype=torch.bfloat16, device=driver.device)
    cuda = driver.device.type == "cuda" and device != "simulated"

    def work(seq: int) -> Callable[[], None]:
        hidden = end.ring(seq)[1].hidden

        def run() -> None:
            assert hidden is not None
            hidden.copy_(source)

        return run

    def run_rounds(first: int, with_data: bool) -> list[float]:
        """Microseconds of each hop."""
        peer.send((first, rounds, with_data))
        peer.recv()
        if cuda:
            torch.cuda._sleep(HEAD_START_CYCLES)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
            events[0].record()
        start = time.perf_counter()
        for seq in range(first, first + rounds):
            if with_data:
                runner.run(work(seq))
            end.publish(seq)
            end.wait_reply(seq, PATIENCE_S)
            if cuda:
                events[seq - first + 1].record()
        runner.synchronize(PATIENCE_S)
        took_us = 1e6 * (time.perf_counter() - start)
        peer.recv()
        if not cuda:
            return [took_us / rounds / 2]
        return [float(one.elapsed_time(other)) * 1e3 / 2 for one, other in pairwise(events)]

    found: dict[str, list[float]] = {"empty": [], "with data": []}
    seq = 1
    for repeat in range(-1, repeats):
        for name, values in found.items():
            hops = run_rounds(seq, name == "with data")
            seq += rounds
            if repeat >= 0:
                values.extend(hops)
    peer.send(None)
    end.close()
    end.wait_closed(PATIENCE_S)
    figures = {name: round(statistics.median(values), 2) for name, values in found.items()}
    worst = {f"{name}, p99": round(sorted(values)[len(values) * 99 // 100], 2) for name, values in found.items()}
    link.send(figures | worst)


def measure(devices: list[str], rounds: int, repeats: int) -> dict[str, float]:
    """Both processes, in the environment as it is now. RuntimeError: one of them died."""
    context = multiprocessing.get_context("spawn")
    result, result_end = context.Pipe()
    target_side, drafter_side = context.Pipe()
    target = context.Process(target=be_target, args=(result_end, target_side, devices[0], rounds, repeats))
    drafter = context.Process(target=be_drafter, args=(drafter_side, devices[1]))
    for process in (target, drafter):
        process.start()
    for end in (result_end, target_side, drafter_side):
        end.close()
    try:
        if not result.poll(PATIENCE_S * 2):
            raise RuntimeError("no answer in time")
        figures: dict[str, float] = result.recv()
        return figures
    except EOFError:
        raise RuntimeError("the target's process died") from None
    finally:
        for process in (target, drafter):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:0"], help="the target's and the drafter's")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    simulated = options.devices[0] == "simulated"
    if not simulated and not has_gpu():
        print("Nothing measured: there is no GPU here.")
        print(json.dumps({"device": None}))
        return
    shared = options.devices[0] == options.devices[1] and not simulated
    result: dict[str, Any] = {"devices": options.devices, "rounds": options.rounds, "hop_us": {}}
    if shared:
        with shared_gpu(torch.device("cuda")) as env:
            if env:
                result["hop_us"]["MPS"] = measure(options.devices, options.rounds, options.repeats)
    name = "no MPS" if shared else "simulated" if simulated else "two GPUs"
    result["hop_us"][name] = measure(options.devices, options.rounds, options.repeats)
    columns = ("empty", "empty, p99", "with data", "with data, p99")
    table = Table("between", *columns, title="a hop, microseconds")
    for name, figures in result["hop_us"].items():
        table.add_row(name, *(f"{figures[key]:.1f}" for key in columns))
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
