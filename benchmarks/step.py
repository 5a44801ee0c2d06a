"""What does a step cost when target and drafter are two processes, beside the same code in one?

    python -m benchmarks.step [--model DIR] [--head DIR] [--batches 1 16 64] [--draft-len 3] [--depth 3]

Four ways, in turn, over the same rows (long-running decode, all of one context length):
  a  the split, run-ahead: target and drafter processes, `--depth` plans under way
  b  the split, lockstep: the same processes, a plan leaves when the verdict before it has come
  c  one process: target and drafter code on one stream of `--device`, the channel in its own memory, as far ahead as
     in a
  d  no drafting: the target alone
  e  the split, run-ahead, the rows in two halves that take turns: one is drafted for while the other is verified
     (counted per step of all rows; of use where the drafter has a GPU of its own)
The processes are driven by `benchmarks.plan_driver` over gRPC; on a GPU they share it under a private MPS daemon. With
`--load-format dummy` any config.json will do, and `--accept` sets the mean number of tokens a row gives in a step.
`--pcp-size` makes the target so many ranks, on the GPUs from `--device` on (without c, which has one rank).
On GPUs what a hop takes is measured first (`benchmarks.hop`). Compare the ratios: they are taken round by round within
one run. `floor` is the bytes of weights and KV over the copy bandwidth of this run. A table, then one JSON object as
the last line. `--device cpu` with a tiny model is a dry run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import hop
from benchmarks.floor import BusySampler, copy_bandwidth
from benchmarks.one_process import OneProcess
from benchmarks.plan_driver import Load, PlanDriver, run_driver
from benchmarks.services import Services
from benchmarks.shared_gpu import shared_gpu
from benchmarks.step_report import Sample, print_table, summary
from benchmarks.step_setting import WARM_STEPS, WAYS, Setting, add_arguments, setting_of
from engine.model_config import ModelConfig


async def sample_split(
    driver: PlanDriver,
    load: Load,
    setting: Setting,
    depth: int,
    services: Services,
    busy: BusySampler,
    groups: int = 1,
) -> Sample:
    """Prompts, warm steps, then the measured ones."""
    await driver.place(load)
    await driver.decode(WARM_STEPS, depth, groups)
    before = services.cpu_seconds()
    with busy:
        timeline = await driver.decode(setting.steps, depth, groups)
    after = services.cpu_seconds()
    await driver.release()
    host = {name: 1e3 * (after[name] - before[name]) / setting.steps for name in after}
    return Sample(timeline, busy.share, host, groups)


HOP_ROUNDS, HOP_REPEATS = 200, 3


async def measure(
    setting: Setting, scratch: Path, console: Console
) -> tuple[dict[int, dict[str, list[Sample]]], float, dict[str, float] | None]:
    """All samples by batch and way, the copy bandwidth, and what a hop takes (None on a CPU). Everything is started at
    once, and measured in turn.
    """
    target, drafter = setting.sections()
    device = torch.device(setting.device)
    busy = BusySampler(device.index or 0 if device.type == "cuda" else None)
    vocab_size = ModelConfig.from_directory(setting.model).vocab_size
    samples: dict[int, dict[str, list[Sample]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        env = {}
        if setting.shares_gpu:
            env = stack.enter_context(shared_gpu(device))
        hop_us = measure_hop(setting, console)
        services = stack.enter_context(Services(scratch / "split", str(setting.model), target, drafter, env))
        one = None
        if "c" in setting.ways:
            together = {**drafter, "device": setting.device}
            one = stack.enter_context(OneProcess(scratch / "one", str(setting.model), target, together))
        if device.type == "cuda":
            torch.zeros(1, device=device)  # this process's own start, beside theirs
        services.wait_ready()
        if one is not None:
            one.wait_ready()
        bandwidth = copy_bandwidth(device)
        console.print(f"copies move {bandwidth / 1e12:.2f} TB/s, read and written", highlight=False)
        split = await stack.enter_async_context(PlanDriver(services.target_address, services.drafter_address, "split"))
        alone = await stack.enter_async_context(PlanDriver(services.target_address, None, "alone"))
        console.print(f"channel {split.channel.kind}")
        for batch in setting.batches:
            drafting, plain = (setting.load(batch, vocab_size, length) for length in (setting.draft_len, 0))
            ways = setting.ways if batch > 1 else setting.ways.replace("e", "")
            samples[batch] = {way: [] for way in ways}
            for number in range(setting.rounds):
                for way in ways if number % 2 == 0 else reversed(ways):
                    if way == "c":
                        assert one is not None
                        with busy:
                            timeline, host, parts = one.run(drafting, WARM_STEPS, setting.steps, setting.depth)
                        sample = Sample(timeline, busy.share, host, parts_us=parts)
                    elif way == "d":
                        sample = await sample_split(alone, plain, setting, setting.depth, services, busy)
                    else:
                        depth, groups = {"a": (setting.depth, 1), "b": (1, 1), "e": (max(4, setting.depth), 2)}[way]
                        sample = await sample_split(split, drafting, setting, depth, services, busy, groups)
                    samples[batch][way].append(sample)
                    console.print(
                        f"batch {batch}, round {number + 1}, {WAYS[way]}: {sample.step_ms:.3f} ms a step, "
                        f"{sample.timeline.mean_accepted_len:.2f} tokens, {sample.timeline.missed} missed"
                    )
    return samples, bandwidth, hop_us


def measure_hop(setting: Setting, console: Console) -> dict[str, float] | None:
    """Microseconds from one process's GPU work to the other's, by `benchmarks.hop`, in the environment as it is."""
    devices = [torch.device(name) for name in (setting.device, setting.drafter_device)]
    if any(device.type != "cuda" for device in devices):
        return None
    hop_us = hop.measure([f"cuda:{device.index or 0}" for device in devices], HOP_ROUNDS, HOP_REPEATS)
    console.print(
        f"a hop takes {hop_us['empty']:.1f} us, with data of 64 rows {hop_us['with data']:.1f}", highlight=False
    )
    return hop_us


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    setting = setting_of(parser.parse_args())
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        samples, bandwidth, hop_us = run_driver(measure(setting, Path(scratch), console))
    result = summary(setting, samples, bandwidth) | {"hop_us": hop_us}
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
