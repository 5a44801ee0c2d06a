"""Where does a step's time on the GPU go, and does anything on the drafting path go to the host?

    python -m benchmarks.step_profile [--model DIR] [--head DIR] [--batch 1] [--draft-len 3] [--load-format dummy]

Target and drafter in one process on one stream (benchmarks.one_process), decode steps run ahead, under torch's
profiler. Reported per step: the share of time in which the GPU ran something, launches and copies by direction, the
time of drafting, copies to the host between the kernel that takes a ring entry over and the one that finishes the reply
(there must be none), and the kernels that take longest. A table, then JSON. Needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.one_process import both_in_one
from benchmarks.plan_driver import PlanDriver
from benchmarks.shared_gpu import has_gpu
from benchmarks.step_setting import add_arguments, setting_of

PROFILED_STEPS = 24
WARM_STEPS = 16
# Kernel names. The target has a `_take` too; the last one before a `_finish` is the drafter's.
TAKES_ENTRY, FINISHES_REPLY = "_take", "_finish"
TO_HOST = "Memcpy DtoH"


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work on the GPU: microseconds."""

    name: str
    start: float
    end: float


def gpu_work(profiler: Any) -> list[Work]:
    """Everything that ran on the GPU, in order of time."""
    found = [
        Work(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, key=lambda work: work.start)


def busy_us(works: list[Work]) -> float:
    """Microseconds in which something ran; what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for work in works:
        total += max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)
    return total


def drafting_paths(works: list[Work]) -> list[list[Work]]:
    """For each reply: what ran from the kernel that takes the entry over to the one that finishes the reply."""
    paths, begin = [], None
    for index, work in enumerate(works):
        if work.name == TAKES_ENTRY:
            begin = index
        elif work.name == FINISHES_REPLY and begin is not None:
            paths.append(works[begin : index + 1])
            begin = None
    return paths


def summarize(works: list[Work], num_steps: int) -> dict[str, Any]:
    """Figures per step."""
    span = works[-1].end - works[0].start
    paths = drafting_paths(works)
    kinds = Counter(work.name if work.name.startswith("Mem") else "kernel" for work in works)
    by_name: Counter[str] = Counter()
    for work in works:
        by_name[work.name] += round((work.end - work.start) * 1e3)
    return {
        "steps": num_steps,
        "step_us": round(span / num_steps, 1),
        "gpu_busy": round(busy_us(works) / span, 4),
        "drafting_us": round(sum(path[-1].end - path[0].start for path in paths) / max(1, len(paths)), 1),
        "drafting_launches": round(sum(map(len, paths)) / max(1, len(paths)), 1),
        "replies": len(paths),
        "copies_to_host_while_drafting": sum(work.name.startswith(TO_HOST) for path in paths for work in path),
        "per_step": {name: round(count / num_steps, 2) for name, count in kinds.most_common()},
        "longest": {name[:90]: round(ns / 1e3 / num_steps, 2) for name, ns in by_name.most_common(20)},
    }


async def profiled(target: Any, drafter: Any, load: Any, depth: int) -> list[Work]:
    """Decode steps under the profiler."""
    async with PlanDriver(target, drafter, "profile") as driver:
        await driver.place(load)
        await driver.decode(WARM_STEPS, depth)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            await driver.decode(PROFILED_STEPS, depth)
            torch.cuda.synchronize()
        await driver.release()
    return gpu_work(profiler)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    if not has_gpu():
        print("Nothing measured: there is no GPU here.")
        print(json.dumps({"steps": 0}))
        return
    options.batches, options.steps = [options.batch], PROFILED_STEPS + WARM_STEPS
    setting = setting_of(options)
    target_section, drafter_section = setting.sections()
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "profile.yaml"
        sections = {"model": str(setting.model), "target": target_section, "drafter": drafter_section}
        config.write_text(yaml.safe_dump(sections))
        with both_in_one(config) as (target, drafter):
            load = setting.load(options.batch, int(target.info.vocab_size), setting.draft_len)
            result = summarize(asyncio.run(profiled(target, drafter, load, setting.depth)), PROFILED_STEPS)
    table = Table("kernel", "us a step", title=f"{setting.model.name}, batch {options.batch}, one process")
    for name, microseconds in result["longest"].items():
        table.add_row(name, f"{microseconds:.2f}")
    Console(width=130).print(table)
    for key, value in result.items():
        if key != "longest":
            print(f"{key.replace('_', ' ')}: {value}")
    print(json.dumps({**result, "model": setting.model.name, "batch": options.batch}))


if __name__ == "__main__":
    main()
