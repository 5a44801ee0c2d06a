"""What do steps cost a target of several ranks, beside one of one, and are its tokens the same?

    python -m benchmarks.pcp_steps [--sizes 1 2] [--model DIR --load-format dummy] [--prompts 2048 16384 65536]
                                   [--batches 1 16 64 256] [--execution host|device]

Starts targets of every `pcp_size`, side by side (the GPUs' memory takes them all), and uses them in turn: first a tiny
model in fp32 whose tokens must not depend on the size; then, at the model's size, whole prompts, alone, and decode
steps. With host execution their rows are of 1 + 3 tokens; with device execution of one, as absent
drafts are not run there without a drafter (`benchmarks.step --pcp-size` has one), and `--depth` plans are under way;
decode steps are then replays of captured ones, on one rank and, over NCCL, on several. Reported: milliseconds, of which
in collectives on rank 0 (0 for captured steps, whose graphs have no times), how much faster than one rank, what the
model of `benchmarks.pcp` says of both, and how many graphs each target captured at its start. A table, then JSON.
`--device cpu` with a tiny model is a dry run over gloo.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pcp import Node, prompt_model, step_model
from benchmarks.plan_driver import Load, PlanDriver, Timeline, run_driver
from benchmarks.services import Services
from benchmarks.shared_gpu import has_gpu
from engine.fetch import fetch_model
from engine.model_config import ModelConfig
from tests.tiny_models import make_tiny_model

VERIFY_LEN = 3
WARM_STEPS = 3
CHECK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    model: Path
    device: str
    dtype: str
    load_format: str
    attention: str
    execution: str
    depth: int
    sizes: tuple[int, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    context_len: int
    steps: int
    repeats: int
    max_step_tokens: int

    @property
    def verify_len(self) -> int:
        """Drafts of the rows of decode steps, all absent."""
        return VERIFY_LEN if self.execution == "host" else 0

    def section(self, size: int) -> dict[str, Any]:
        """The target's config at `size` ranks."""
        most = max((*self.prompts, self.context_len)) + 64 + self.steps
        blocks = max(-(-most // 16), max(self.batches) * -(-(self.context_len + self.steps + 64) // 16)) + 16
        section: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "pcp_size": size,
            "num_seats": max(self.batches),
            "num_blocks": blocks,
            "max_model_len": most,
            "max_step_tokens": self.max_step_tokens,
            "max_verify_len": VERIFY_LEN,
            "prefix_caching": False,
            "trim_absent_drafts": False,
            "attention": self.attention,
            "execution": self.execution,
        }
        if self.execution == "device":
            section["graph_rows"] = sorted({1, 4, 16, 64, *self.batches})
        if self.device == "cpu":
            return {**section, "threads": 1}
        return {**section, "load_format": self.load_format}


def attention_of(device: str, execution: str) -> str:
    """The attention where none is named."""
    return "triton" if device != "cpu" else "reference" if execution == "device" else "torch"


def num_captured(services: Services) -> int:
    """Graphs that the target captured at its start: as it says, once it is ready."""
    found = re.search(r"warm: (\d+) graphs captured", services.log("target", 1 << 20))
    return int(found.group(1)) if found is not None else 0


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    source = random.Random(11)
    return [[source.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def collective_ms(results: Sequence[Any]) -> float | None:
    """Mean over steps of what rank 0 stood in collectives; None where the service does not tell."""
    told = [value for result in results if (value := getattr(result, "collective_ms", None)) is not None]
    return round(statistics.fmean(told), 3) if told else None


async def time_prompt(driver: PlanDriver, length: int, vocab_size: int) -> tuple[float, float | None]:
    """Milliseconds from the first plan of a prompt alone to its first token, and of them in collectives."""
    timeline = await driver.place(Load(random_prompts(1, length, vocab_size), 0, 8))
    await driver.release()
    inside = collective_ms(timeline.results)
    total = 1e3 * (timeline.arrivals[-1] - timeline.started)
    return total, None if inside is None else inside * len(timeline.results)


async def time_verify(driver: PlanDriver, rows: int, setting: Setting, vocab_size: int) -> Timeline:
    """Decode steps over `rows` rows."""
    prompts = random_prompts(rows, setting.context_len, vocab_size)
    await driver.place(Load(prompts, 0, setting.steps + WARM_STEPS + 16, blind_verify_len=setting.verify_len))
    await driver.decode(WARM_STEPS, setting.depth)
    timeline = await driver.decode(setting.steps, setting.depth)
    await driver.release()
    return timeline


async def measure(setting: Setting, services: dict[int, Services], console: Console) -> dict[str, Any]:
    """Prompts and verify steps by size."""
    model, node = ModelConfig.from_directory(setting.model), Node()
    vocab_size = model.vocab_size
    found: dict[str, Any] = {"captured": {}, "prefill": {}, "verify": {}}
    async with AsyncExitStack() as stack:
        drivers = {}
        for size, running in services.items():
            running.wait_ready()
            found["captured"][str(size)] = num_captured(running)
            drivers[size] = await stack.enter_async_context(PlanDriver(running.target_address, None, f"p{size}"))
        for length in setting.prompts:
            times: dict[int, list[tuple[float, float | None]]] = {size: [] for size in drivers}
            for repeat in range(-1, setting.repeats):
                for size, driver in drivers.items():
                    timed = await time_prompt(driver, length, vocab_size)
                    if repeat >= 0:
                        times[size].append(timed)
            predicted = {
                size: prompt_model(length, setting.max_step_tokens, size, model, node)["ms"] for size in drivers
            }
            found["prefill"][str(length)] = entries = by_size(times, predicted)
            console.print(f"prompt of {length}: {in_words(entries)}", highlight=False)
        for rows in setting.batches:
            timelines = {size: await time_verify(driver, rows, setting, vocab_size) for size, driver in drivers.items()}
            found["verify"][str(rows)] = entries = by_size(
                {
                    size: [(time, collective_ms(timeline.results)) for time in timeline.step_times_ms(4, 2)]
                    for size, timeline in timelines.items()
                },
                {
                    size: step_model([(setting.context_len, 1 + setting.verify_len, False)] * rows, size, model, node)[
                        "ms"
                    ]
                    for size in drivers
                },
            )
            console.print(f"{rows} rows: {in_words(entries)}", highlight=False)
    return found


def by_size(times: dict[int, list[tuple[float, float | None]]], predicted: dict[int, float]) -> dict[str, Any]:
    """Median milliseconds by size, of them in collectives, and the speed-up over the first size. predicted:
    milliseconds by the model.
    """
    medians = {size: statistics.median(total for total, _ in values) for size, values in times.items()}
    first = next(iter(medians.values()))
    found = {}
    for size, values in times.items():
        inside = [value for _, value in values if value is not None]
        found[str(size)] = {
            "ms": round(medians[size], 3),
            "collective_ms": round(statistics.median(inside), 3) if inside else None,
            "speed_up": round(first / medians[size], 3),
            "predicted_ms": round(predicted[size], 3),
            "predicted_speed_up": round(next(iter(predicted.values())) / predicted[size], 3),
        }
    return found


def in_words(entries: dict[str, Any]) -> str:
    """A line of progress."""
    return ", ".join(f"{size} ranks {entry['ms']:.1f} ms" for size, entry in entries.items())


async def check(targets: dict[int, Services]) -> dict[str, bool]:
    """By size: are greedy and seeded tokens, prompts in chunks, several rows, those of the first size?"""
    prompts = [prompt for length in (1, 7, 33, 90, 211) for prompt in random_prompts(1, length, 512)]
    answers: dict[int, list[Any]] = {}
    for size, target in targets.items():
        target.wait_ready()
        async with PlanDriver(target.target_address, None, f"check{size}") as driver:
            answers[size] = []
            for temperature in (0.0, 1.0):
                await driver.place(Load(prompts, 0, CHECK_TOKENS + 2, temperature))
                timeline = await driver.decode(CHECK_TOKENS, 2)
                answers[size].append(list(timeline.tokens.values()))
                await driver.release()
    first = next(iter(answers.values()))
    complete = [[CHECK_TOKENS] * len(prompts)] * 2
    return {
        str(size): answer == first and [list(map(len, way)) for way in answer] == complete
        for size, answer in answers.items()
    }


def start(setting: Setting, scratch: Path, stack: ExitStack) -> tuple[dict[int, Services], dict[int, Services]]:
    """By size: targets of a tiny model in fp32, to check, and those to measure; all starting."""
    tiny = make_tiny_model(scratch / "tiny")
    small: dict[str, Any] = {"device": setting.device, "max_step_tokens": 64, "threads": 1}
    small |= {"attention": setting.attention, "execution": setting.execution}
    checked = {
        size: Services(scratch / f"check{size}", str(tiny), {**small, "pcp_size": size}, None) for size in setting.sizes
    }
    measured = {
        size: Services(scratch / f"p{size}", str(setting.model), setting.section(size), None) for size in setting.sizes
    }
    for services in (*checked.values(), *measured.values()):
        stack.enter_context(services)
    return checked, measured


def print_table(result: dict[str, Any]) -> None:
    modelled = result["device"] != "cpu"  # the model is of a node of H200s
    columns = ("step", "ranks", "ms", "in collectives", "x one rank", *(("model ms", "model x") if modelled else ()))
    table = Table(*columns, title=f"{result['model']}, {result['device']}, {result['execution']} execution")
    for kind, entries in (("prompt of {}", result["prefill"]), ("{} decode rows", result["verify"])):
        for name, by in entries.items():
            for size, row in by.items():
                cells = [row["ms"], row["collective_ms"], row["speed_up"]]
                if modelled:
                    cells += [row["predicted_ms"], row["predicted_speed_up"]]
                table.add_row(kind.format(name), size, *map(str, cells))
    Console(width=110).print(table)
    print("same tokens as one rank:", result["same_tokens"], "graphs captured:", result["captured"])


def main() -> None:
    """Parse, run, print. Exit status 1: tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or name; default: a tiny model made on the spot")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--attention", help="default: triton; on a CPU torch, or reference with device execution")
    parser.add_argument("--execution", choices=("host", "device"), default="device")
    parser.add_argument("--depth", type=int, help="plans under way in decode steps; default: 1, device execution 3")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 16384, 65536])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="of the rows of verify steps")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-step-tokens", type=int, default=16384)
    options = parser.parse_args()
    console = Console(stderr=True)
    execution = options.execution
    attention = options.attention or attention_of(options.device, execution)
    with tempfile.TemporaryDirectory() as scratch_name, ExitStack() as stack:
        scratch = Path(scratch_name)
        model = fetch_model(options.model) if options.model else make_tiny_model(scratch / "model")
        setting = Setting(
            model=model,
            device=options.device,
            dtype=options.dtype,
            load_format=options.load_format,
            attention=attention,
            execution=execution,
            depth=options.depth or (3 if execution == "device" else 1),
            sizes=tuple(options.sizes),
            prompts=tuple(options.prompts),
            batches=tuple(options.batches),
            context_len=options.context,
            steps=options.steps,
            repeats=options.repeats,
            max_step_tokens=options.max_step_tokens,
        )
        checked, measured = start(setting, scratch, stack)
        same = run_driver(check(checked))
        console.print(f"same tokens: {same}", highlight=False)
        result = run_driver(measure(setting, measured, console))
    result |= {"model": model.name, "device": options.device, "dtype": options.dtype, "same_tokens": same}
    result |= {"execution": execution, "decode_row_tokens": 1 + setting.verify_len}
    print_table(result)
    print(json.dumps(result))
    if not all(same.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
