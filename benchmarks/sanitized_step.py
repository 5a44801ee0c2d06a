"""Do a target and a drafter read or write memory that is not theirs while they serve a request?

    python -m benchmarks.sanitized_step [--tool memcheck]

A tiny model; each service runs under compute-sanitizer, on one GPU without MPS (which the tool does not support). Two
requests are placed, their prompts run in chunks, then decode steps run ahead with drafts. Twice: through captured
graphs; and with no graphs but an allocation of its own for every tensor, so that the tool sees where each one ends (a
capture cannot allocate so). Ends with the number of errors by service, as JSON; exit status 1 when there are any. Needs
a GPU and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plan_driver import Load, PlanDriver, Timeline
from benchmarks.sections import sanitizer
from benchmarks.services import Services
from benchmarks.shared_gpu import has_gpu
from tests.tiny_models import make_tiny_model

PORTS = {"target": 52_152, "drafter": 53_152}
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
DEADLINE_MS = 60_000  # everything is slow under the tool
NUM_STEPS = 6
DRAFT_LEN = 3
# By name: settings of both services, and of their environment.
PASSES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "graphs": ({}, {}),
    "bounds": ({"cuda_graphs": False}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
}


async def serve(services: Services) -> Timeline:
    """Two requests: prompts in chunks, then decode steps."""
    load = Load([list(range(5, 75)), list(range(9, 40))], DRAFT_LEN, 100)
    async with PlanDriver(services.target_address, services.drafter_address, "sanitized", DEADLINE_MS) as driver:
        await driver.place(load)
        timeline = await driver.decode(NUM_STEPS, 2)
        await driver.release()
        return timeline


def errors(log: str) -> int | None:
    """What the tool counted; None where it did not say."""
    found = [int(match[1] or match[2]) for match in SUMMARY.finditer(log)]
    return sum(found) if found else None


def run_pass(
    scratch: Path, model: str, settings: Mapping[str, Any], env: Mapping[str, str], tool: str
) -> dict[str, Any]:
    """One run of both services; what the tool says of them is printed."""
    both: dict[str, Any] = {
        "device": "cuda",
        "attention": "triton",
        "channel_kinds": ["cuda_ipc"],
        "num_seats": 2,
        "graph_rows": [1, 2],  # each takes seconds to capture under the tool
        "num_blocks": 32,
        "heartbeat_deadline_s": 30.0,
        **settings,
    }
    target = {**both, "max_step_tokens": 48, "max_wait_ms": DEADLINE_MS}
    drafter = {**both, "method": "eagle3", "random_head": {"seed": 1}, "max_draft_len": DRAFT_LEN}
    wrappers = {name: sanitizer(tool, port) for name, port in PORTS.items()}
    services = Services(scratch, model, target, drafter, env, wrappers)
    with services:
        services.wait_ready()
        timeline = asyncio.run(serve(services))
    logs = {name: services.log(name, 1 << 20) for name in services.names}
    counts = {name: errors(log) for name, log in logs.items()}
    for name, log in logs.items():
        marked = [line for line in log.splitlines() if line.startswith("=========")]
        print(f"--- {scratch.name}, {name}: {counts[name]} errors", *marked[:60], sep="\n")
    return {
        "errors": counts,
        "steps": len(timeline.results),
        "tokens": timeline.num_tokens,
        "missed": timeline.missed,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    options = parser.parse_args()
    if not has_gpu() or shutil.which("compute-sanitizer") is None:
        print("Nothing checked: there is no GPU, or no compute-sanitizer, here.")
        print(json.dumps({"errors": None}))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = str(make_tiny_model(Path(scratch) / "model"))
        for name, (settings, env) in PASSES.items():
            results[name] = run_pass(Path(scratch) / name, model, settings, env, options.tool)
    print(json.dumps({"tool": options.tool, **results}))
    counts = [count for result in results.values() for count in result["errors"].values()]
    if any(counts) or None in counts:
        sys.exit(1)


if __name__ == "__main__":
    main()
