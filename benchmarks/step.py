"""What does a step cost when target and drafter are two processes, beside the same code in one?

    python -m benchmarks.step [--model DIR] [--head DIR] [--batches 1 16 64] [--draft-len 3] [--depth 3]

Four ways, in turn, over the same rows (long-running decode, all of one context length):
  a  the split, run-ahead: target and drafter processes, `--depth` plans under way
  b  the split, lockstep: the same processes, a plan leaves when the verdict before it has come
  c  one process: target and drafter code on one stream, the channel in its own memory, as far ahead as in a
  d  no drafting: the target alone
  e  the split, run-ahead, the rows in two halves that take turns: one is drafted for while the other is verified
     (counted per step of all rows; of use where the drafter has a GPU of its own)
The processes are driven by `benchmarks.plan_driver` over gRPC; on a GPU they share it under a private MPS daemon. With
`--load-format dummy` any config.json will do, and `--accept` sets the mean number of tokens a row gives in a step.
Compare the ratios: they are taken round by round within one run. `floor` is the bytes of weights and KV over the copy
bandwidth of this run. A table, then one JSON object as the last line. `--device cpu` with a tiny model is a dry run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.floor import BusySampler, copy_bandwidth, proposal_bytes, target_step_bytes
from benchmarks.one_process import OneProcess
from benchmarks.plan_driver import Load, PlanDriver, Timeline, run_driver
from benchmarks.services import Services
from benchmarks.shared_gpu import has_gpu, shared_gpu
from drafter_service.eagle3.config import Eagle3Config
from engine.model_config import ModelConfig

WAYS = {
    "a": "split, run-ahead",
    "b": "split, lockstep",
    "c": "one process",
    "d": "no drafting",
    "e": "split, halves in turn",
}
WARM_STEPS = 12
ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: the model, the load and how long for."""

    model: Path
    head: str | None
    device: str
    drafter_device: str
    dtype: str
    load_format: str
    attention: str
    accept: float | None
    batches: tuple[int, ...]
    draft_len: int
    draft_vocab: int
    context_len: int
    depth: int
    steps: int
    rounds: int
    ways: str

    @property
    def max_new_tokens(self) -> int:
        """Of a request: all its steps, every draft accepted, and the bounds of what is under way."""
        return (self.steps + WARM_STEPS + self.depth + 2) * (self.draft_len + 1)

    def sections(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config sections of target and drafter."""
        cuda = self.device.startswith("cuda")
        per_row = -(-(self.context_len + self.max_new_tokens) // 16)
        both: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "num_seats": max(self.batches),
            "num_blocks": per_row * max(self.batches) + 64,
            "max_model_len": self.context_len + self.max_new_tokens,
            "channel_kinds": ["cuda_ipc"] if cuda else ["shm"],
        }
        if cuda:
            both |= {"attention": self.attention, "load_format": self.load_format, "execution": "device"}
        else:
            both |= {"threads": 1}
        target = {**both, "max_step_tokens": 4096, "max_verify_len": self.draft_len, "max_wait_ms": 20_000}
        if self.accept is not None:
            target["accept"] = f"synthetic:{self.accept}"
        drafter = {
            **both,
            "device": self.drafter_device,
            "max_step_tokens": 4096,
            "max_draft_len": self.draft_len,
            "method": "eagle3",
        }
        if self.head is not None:
            drafter["checkpoint"] = self.head
        else:
            drafter["random_head"] = {"draft_vocab_size": self.draft_vocab}
        return target, drafter

    def load(self, batch: int, vocab_size: int, draft_len: int) -> Load:
        """`batch` prompts of random tokens, the same in every way and round, so that later ones hit the cache."""
        source = random.Random(5)
        prompts = [[source.randrange(3, vocab_size) for _ in range(self.context_len)] for _ in range(batch)]
        return Load(prompts, draft_len, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """One way, one batch, one round. groups: plans that a step of all rows takes."""

    timeline: Timeline
    busy: float | None
    host_ms: dict[str, float]  # CPU time per plan, by process
    groups: int = 1
    parts_us: dict[str, float] | None = None  # of the host's time per step, where one process tells

    @property
    def times_ms(self) -> list[float]:
        """Milliseconds per step of all rows, over windows of steps."""
        return [self.groups * time for time in self.timeline.step_times_ms()]

    @property
    def step_ms(self) -> float:
        """Median over windows of steps."""
        return statistics.median(self.times_ms)


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


async def measure(
    setting: Setting, scratch: Path, console: Console
) -> tuple[dict[int, dict[str, list[Sample]]], float]:
    """All samples by batch and way, and the copy bandwidth. Everything is started at once, and measured in turn."""
    target, drafter = setting.sections()
    device = torch.device(setting.device)
    busy = BusySampler(device.index or 0 if device.type == "cuda" else None)
    vocab_size = ModelConfig.from_directory(setting.model).vocab_size
    samples: dict[int, dict[str, list[Sample]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        env = {}
        if setting.drafter_device == setting.device:
            env = stack.enter_context(shared_gpu(device))
        services = stack.enter_context(Services(scratch / "split", str(setting.model), target, drafter, env))
        one = None
        if "c" in setting.ways:
            one = stack.enter_context(OneProcess(scratch / "one", str(setting.model), target, drafter))
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
    return samples, bandwidth


def mean_of(messages: Sequence[Any], field: str) -> float | None:
    """Mean of a field of results or reports."""
    return round(statistics.fmean(getattr(message, field) for message in messages), 4) if messages else None


def summary(setting: Setting, samples: dict[int, dict[str, list[Sample]]], bandwidth: float) -> dict[str, Any]:
    """Figures by batch and way, and the ratios."""
    model, item_size = ModelConfig.from_directory(setting.model), ITEM_SIZE[setting.dtype]
    head = head_shape(setting, model)
    batches: dict[str, Any] = {}
    for batch, by_way in samples.items():
        figures: dict[str, Any] = {}
        for way, rounds in by_way.items():
            results = [result for sample in rounds for result in sample.timeline.results]
            reports = [report for sample in rounds for report in sample.timeline.reports]
            times = sorted(time for sample in rounds for time in sample.times_ms)
            # The context at the middle of the measured steps.
            accepted = statistics.fmean(sample.timeline.mean_accepted_len for sample in rounds)
            context_len = setting.context_len + round(accepted * (WARM_STEPS + setting.steps / 2))
            num_bytes = target_step_bytes(model, item_size, batch, context_len)
            if way != "d":
                num_bytes += proposal_bytes(head, item_size, batch, context_len, setting.draft_len)
            step_ms, floor_ms = statistics.median(times), 1e3 * num_bytes / bandwidth
            busy = [sample.busy for sample in rounds if sample.busy is not None]
            figures[way] = {
                "step_ms": round(step_ms, 4),
                "step_ms_quartiles": [round(times[len(times) // 4], 4), round(times[-1 - len(times) // 4], 4)],
                "tokens_per_row": round(accepted, 3),
                "gpu_busy": round(statistics.fmean(busy), 3) if busy else None,
                "host_ms": {
                    name: round(statistics.fmean(sample.host_ms[name] for sample in rounds), 3)
                    for name in rounds[0].host_ms
                },
                "host_parts_us": rounds[-1].parts_us,
                "target": {f: mean_of(results, f) for f in ("wait_ms", "forward_ms", "verify_ms", "total_ms")},
                "drafter": {
                    f: mean_of(reports, f)
                    for f in ("wait_ms", "prefill_ms", "draft_ms", "total_ms", "metadata_builds", "metadata_launches")
                },
                "missed": sum(sample.timeline.missed for sample in rounds),
                "floor_ms": round(floor_ms, 4),
                "over_floor": round(step_ms / floor_ms, 3),
            }
        batches[str(batch)] = {"ways": figures, **ratios(by_way)}
    return {
        "model": setting.model.name,
        "device": torch.cuda.get_device_name() if setting.device.startswith("cuda") else "cpu",
        "dtype": setting.dtype,
        "draft_len": setting.draft_len,
        "context_len": setting.context_len,
        "depth": setting.depth,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "batches": batches,
    }


def ratios(by_way: dict[str, list[Sample]]) -> dict[str, Any]:
    """What the split costs; medians of ratios taken within a round."""
    found: dict[str, Any] = {}
    for name, over, under in (
        ("split_tax", "a", "c"),
        ("lockstep_over_run_ahead", "b", "a"),
        ("drafting", "a", "d"),
        ("halves_gain", "a", "e"),
    ):
        if over in by_way and under in by_way:
            pairs = zip(by_way[over], by_way[under], strict=True)
            ratio = statistics.median(a.step_ms / b.step_ms for a, b in pairs)
            found[name] = round(ratio - 1 if name == "split_tax" else ratio, 4)
    if "a" in by_way and "c" in by_way:
        # One step passes the channel twice: to the drafter and back. What else the split costs is in here too.
        pairs = zip(by_way["a"], by_way["c"], strict=True)
        found["hop_us_bound"] = round(statistics.median(1e3 * (a.step_ms - b.step_ms) / 2 for a, b in pairs), 1)
    return found


def head_shape(setting: Setting, model: ModelConfig) -> Eagle3Config:
    """The head that drafts: the checkpoint's, or one shaped like the target."""
    if setting.head is not None:
        from drafter_service.eagle3.config import read_config
        from engine.fetch import fetch_model

        return read_config(json.loads((fetch_model(setting.head) / "config.json").read_text()))
    return Eagle3Config(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_eps=model.rms_eps,
        vocab_size=model.vocab_size,
        draft_vocab_size=setting.draft_vocab,
        target_hidden_size=model.hidden_size,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_len=model.max_model_len,
    )


def print_table(result: dict[str, Any]) -> None:
    """For people."""
    table = Table(title=f"{result['model']}, {result['dtype']}, draft_len {result['draft_len']}, {result['device']}")
    for column in ("batch", "way", "step ms", "tokens", "floor ms", "x floor", "GPU busy", "host ms", "builds"):
        table.add_column(column, justify="right")
    for batch, figures in result["batches"].items():
        for way, row in figures["ways"].items():
            host = " + ".join(f"{value:.2f}" for value in row["host_ms"].values())
            cells = (row["tokens_per_row"], row["floor_ms"], row["over_floor"], row["gpu_busy"], host)
            builds = row["drafter"]["metadata_builds"]
            table.add_row(batch, f"{way} {WAYS[way]}", f"{row['step_ms']:.3f}", *map(str, cells), str(builds))
        rest = {key: value for key, value in figures.items() if key != "ways"}
        table.add_row(batch, *(f"{key} {value}" for key, value in rest.items()), end_section=True)
    Console(width=150).print(table)
    for batch, figures in result["batches"].items():
        if parts := figures["ways"].get("c", {}).get("host_parts_us"):
            print(f"batch {batch}, host, us a step in one process:", ", ".join(f"{k} {v}" for k, v in parts.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this module and `benchmarks.step_profile` take."""
    parser.add_argument("--model", help="directory or name of the model; default: a tiny one made on the spot")
    parser.add_argument("--head", help="the EAGLE-3 head's checkpoint; default: random weights, shaped like the model")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--drafter-device", help="where the drafter runs, if not on --device, such as cuda:1")
    parser.add_argument("--dtype", choices=sorted(ITEM_SIZE), default="bfloat16")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--accept", type=float, help="mean tokens a row gives in a step, instead of the real verdict")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=32_000, help="of the head with random weights")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="abcd", help="some of a, b, c, d, e")


def setting_of(options: argparse.Namespace) -> Setting:
    """Of what `add_arguments` took."""
    if options.model is None:
        from tests.tiny_models import VOCAB_SIZE, make_tiny_model

        model = make_tiny_model(Path(tempfile.gettempdir()) / "outrider-tiny-step")
        options.draft_vocab = min(options.draft_vocab, VOCAB_SIZE)
    else:
        from engine.fetch import fetch_model

        model = fetch_model(options.model)
    return Setting(
        model=model,
        head=options.head,
        device=options.device,
        drafter_device=options.drafter_device or options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        attention=options.attention,
        accept=options.accept,
        batches=tuple(options.batches),
        draft_len=options.draft_len,
        draft_vocab=options.draft_vocab,
        context_len=options.context,
        depth=options.depth,
        steps=options.steps,
        rounds=options.rounds,
        ways="".join(way for way in WAYS if way in options.ways),
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    setting = setting_of(parser.parse_args())
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        samples, bandwidth = run_driver(measure(setting, Path(scratch), console))
    result = summary(setting, samples, bandwidth)
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
