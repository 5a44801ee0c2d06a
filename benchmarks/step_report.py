"""What came of the measurement of a step: figures, ratios, a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.floor import proposal_bytes, target_step_bytes
from benchmarks.plan_driver import Timeline
from benchmarks.step_setting import ITEM_SIZE, WARM_STEPS, WAYS, Setting, head_shape
from engine.model_config import ModelConfig


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


def middles(messages: Sequence[Any], *fields: str) -> dict[str, float]:
    """Medians of some fields of results or reports; none of no messages."""
    return {
        field: round(statistics.median(getattr(message, field) for message in messages), 4)
        for field in fields
        if messages
    }


def on_the_gpu(way: str, step_ms: float, target: dict[str, float], drafter: dict[str, float]) -> dict[str, float]:
    """By the services' own events on their streams: which share of a step they worked, waits left out; and, of the
    split, how much longer the target waited for drafts than the drafter worked on them. Below zero: the drafter is at
    work while the target still ends the step before. Nothing where steps are not timed so.
    """
    drafting = drafter.get("prefill_ms", 0.0) + drafter.get("draft_ms", 0.0)
    if not target or (drafter and not drafting):
        return {}
    found = {"busy": round((target["forward_ms"] + target["verify_ms"] + drafting) / step_ms, 4)}
    if drafting and way == "a":
        found["wait_beyond_drafting_us"] = round(1e3 * (target["wait_ms"] - drafting), 1)
    return found


def summary(setting: Setting, samples: dict[int, dict[str, list[Sample]]], bandwidth: float) -> dict[str, Any]:
    """Figures by batch and way, and the ratios."""
    model, item_size = ModelConfig.from_directory(setting.model), ITEM_SIZE[setting.dtype]
    head = head_shape(setting, model)
    on_gpu = setting.device.startswith("cuda")
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
            target = middles(results, "wait_ms", "forward_ms", "verify_ms", "total_ms", "launch_ms")
            drafter = middles(
                reports, "wait_ms", "prefill_ms", "draft_ms", "total_ms", "metadata_builds", "metadata_launches"
            )
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
                "target": target,
                "drafter": drafter,
                "by_events": on_the_gpu(way, step_ms, target, drafter) if on_gpu else {},
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
        "pcp_size": setting.pcp_size,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "batches": batches,
    }


def ratios(by_way: dict[str, list[Sample]]) -> dict[str, Any]:
    """What the split costs; medians of ratios taken within a round."""
    found: dict[str, Any] = {}
    for name, over, under in (
        ("split_tax", "a", "c"),
        ("lockstep", "b", "a"),
        ("drafting", "a", "d"),
        ("halves_gain", "a", "e"),
    ):
        if over in by_way and under in by_way:
            pairs = zip(by_way[over], by_way[under], strict=True)
            ratio = statistics.median(a.step_ms / b.step_ms for a, b in pairs)
            found[name] = round(ratio - 1 if name == "split_tax" else ratio, 4)
    if "a" in by_way and "c" in by_way:
        pairs = zip(by_way["a"], by_way["c"], strict=True)
        found["split_us"] = round(statistics.median(1e3 * (a.step_ms - b.step_ms) for a, b in pairs), 1)
    return found


def print_table(result: dict[str, Any]) -> None:
    """For people."""
    table = Table(title=f"{result['model']}, {result['dtype']}, draft_len {result['draft_len']}, {result['device']}")
    for column in (
        "batch",
        "way",
        "step ms",
        "tokens",
        "floor ms",
        "x floor",
        "GPU busy",
        "host ms",
        "builds",
        "launch us",
        "wait + us",
    ):
        table.add_column(column, justify="right")
    for batch, figures in result["batches"].items():
        for way, row in figures["ways"].items():
            host = " + ".join(f"{value:.2f}" for value in row["host_ms"].values())
            busy = row["by_events"].get("busy", row["gpu_busy"])
            beyond = row["by_events"].get("wait_beyond_drafting_us", "")
            builds = row["drafter"].get("metadata_builds", "")
            launch = round(1e3 * row["target"]["launch_ms"])
            cells = (row["tokens_per_row"], row["floor_ms"], row["over_floor"], busy, host, builds, launch, beyond)
            table.add_row(batch, f"{way} {WAYS[way]}", f"{row['step_ms']:.3f}", *map(str, cells))
        rest = {key: value for key, value in figures.items() if key != "ways"}
        table.add_row(batch, *(f"{key} {value}" for key, value in rest.items()), end_section=True)
    Console(width=150).print(table)
    for batch, figures in result["batches"].items():
        if parts := figures["ways"].get("c", {}).get("host_parts_us"):
            print(f"batch {batch}, host, us a step in one process:", ", ".join(f"{k} {v}" for k, v in parts.items()))
