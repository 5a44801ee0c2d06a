"""What are all the figures of a GPU, with one command?

    make bench-gpu        or        python -m benchmarks.gpu --out benchmarks/results [--only step-8b serve]

Runs every measurement of this folder that needs a GPU, each as a process of its own with a time limit: one that fails
is reported and the rest goes on. Raw output goes to `--out` as NAME.txt, the JSON that each ends with as NAME.json;
then one table of headlines, and all of it as summary.json, whose text is also the last line. The compute-sanitizer
sections come last and run side by side, since nothing is timed there. About eight minutes on an H200; sections for
which `--budget` leaves no time are not run, and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shared_gpu import has_gpu

ROOT = Path(__file__).resolve().parent.parent
SHAPE, HEAD_SHAPE = "configs/shapes/llama-3-8b", "configs/shapes/llama-3-8b-eagle3"
KERNEL_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "small", "tests/gpu/test_kernels_gpu.py")
SANITIZER = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", "--tool")
SANITIZER_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")

STOP_S = 15.0

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One process. argv: after this interpreter, or a whole command where `wrapper` comes first. headline: what of its
    JSON goes into the table. timed: nothing else may run beside it.
    """

    argv: Sequence[str]
    limit_s: float
    headline: Callable[[Result], str]
    wrapper: Sequence[str] = ()
    timed: bool = True


def step_headline(result: Result) -> str:
    parts = []
    for batch, figures in result["batches"].items():
        ways = figures["ways"]
        steps = " ".join(f"{way} {row['step_ms']:.3f}" for way, row in ways.items())
        tax = figures.get("split_tax")
        text = f"batch {batch}: {steps} ms" + (f", split tax {100 * tax:.1f} %" if tax is not None else "")
        if "d" in ways:
            text += f", d {ways['d']['over_floor']:.2f} x floor"
        parts.append(text)
    return "; ".join(parts)


def kernels_headline(result: Result) -> str:
    cases = result["cases"]
    ratios = sorted((case["kernel / floor"], name) for name, case in cases.items() if "kernel / floor" in case)
    middle = f", median {ratios[len(ratios) // 2][0]:.2f} x floor" if ratios else ""
    return f"{len(cases)} cases at {result.get('copy_tb_per_s')} TB/s{middle}"


def hop_headline(result: Result) -> str:
    return "; ".join(
        f"{name}: {figures['empty']:.1f} us, with data {figures['with data']:.1f}"
        for name, figures in result["hop_us"].items()
    )


def serve_headline(result: Result) -> str:
    return (
        f"{result['one_stream_over_better']:.2f} x the better of transformers at 1 stream, "
        f"{result['many_streams_over_generate']:.2f} x generate at {result['streams']}; "
        f"drafting {result['drafting_over_not']:.2f} x, {result['mean_accepted_len']:.2f} tokens a step; "
        f"same tokens in fp32: {result['fp32']['identical']}"
    )


def kill_headline(result: Result) -> str:
    before, after = result["memory_mib"]
    return (
        f"silence {result['longest_silence_ms']} ms (deadline {result['deadline_ms']}), then "
        f"{result['settled_over_undrafted']} x undrafted; back after {result['back_after_s']} s; memory {before} -> "
        f"{after} MiB; same tokens: {result['identical']}"
    )


def sanitized_headline(result: Result) -> str:
    return f"{result['tool']}: errors {result['errors']}, {result['steps']} steps, {result['missed']} missed"


def summary_line(result: Result) -> str:
    return str(result.get("line", ""))


def sections() -> dict[str, Section]:
    """All of them, in the order in which they run."""
    smollm2 = ("--model", "smollm2-135m-instruct", "--head", "smollm2-135m-instruct-eagle3", "--draft-len", "4")
    shape = ("--model", SHAPE, "--head", HEAD_SHAPE, "--load-format", "dummy", "--accept", "2.5", "--draft-len", "3")
    return {
        "hop": Section(("-m", "benchmarks.hop"), 60, hop_headline),
        "step-8b": Section(("-m", "benchmarks.step", *shape, "--batches", "1", "16", "64"), 150, step_headline),
        "step-smollm2": Section(
            ("-m", "benchmarks.step", *smollm2, "--batches", "1", "32", "--context", "256", "--steps", "300"),
            90,
            step_headline,
        ),
        "serve": Section(("-m", "benchmarks.serve_gpu"), 140, serve_headline),
        "drafter-kill": Section(("-m", "benchmarks.drafter_kill"), 80, kill_headline),
        "kernels": Section(("-m", "benchmarks.kernels", "--repeats", "15"), 90, kernels_headline),
        "memcheck-kernels": Section(KERNEL_TESTS, 110, summary_line, (*SANITIZER, "memcheck"), timed=False),
        "racecheck-kernels": Section(KERNEL_TESTS, 110, summary_line, (*SANITIZER, "racecheck"), timed=False),
        "memcheck-served": Section(("-m", "benchmarks.sanitized_step"), 150, sanitized_headline, timed=False),
    }


def run_section(name: str, section: Section, limit_s: float, out: Path) -> Result:
    """Run one; its output in `out`. Never raises for what the section does."""
    wrapper = [*section.wrapper]
    if wrapper and shutil.which(wrapper[0]) is None:
        return {"status": f"no {wrapper[0]} here", "seconds": 0.0, "headline": "", "result": None}
    start = time.monotonic()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    with (out / f"{name}.txt").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*wrapper, sys.executable, *section.argv],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"not done within {limit_s:.0f} s"
            process.send_signal(signal.SIGINT)  # it puts away what it started, an MPS daemon among it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started, too
            process.wait(10)
    text = (out / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
    result = last_json(text)
    if result is None and section.headline is summary_line:
        found = SANITIZER_SUMMARY.findall(text)
        passed = re.findall(r"\d+ passed.*", text)
        result = {"line": "; ".join([*passed[-1:], *found[-1:]])} if found else None
    headline = ""
    if result is not None:
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        try:
            headline = section.headline(result)
        except (KeyError, TypeError, ValueError) as error:
            headline = f"no headline: {error!r}"
    return {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "headline": headline or last_words(text),
        "result": result,
    }


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def last_json(text: str) -> Result | None:
    """The JSON object in the last line that has one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def last_words(text: str) -> str:
    """What a section that gave no result said at the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def run_all(chosen: dict[str, Section], budget_s: float, out: Path, console: Console) -> dict[str, Result]:
    """The timed ones in turn, then the others side by side."""
    end = time.monotonic() + budget_s
    results: dict[str, Result] = {}

    def run(name: str) -> None:
        left = end - time.monotonic()
        if left < 15:
            results[name] = {"status": "no time left", "seconds": 0.0, "headline": "", "result": None}
        else:
            results[name] = run_section(name, chosen[name], min(chosen[name].limit_s, left), out)
        entry = results[name]
        console.print(f"{name}: {entry['status']}, {entry['seconds']} s. {entry['headline']}", highlight=False)

    for name, section in chosen.items():
        if section.timed:
            run(name)
    rest = [name for name, section in chosen.items() if not section.timed]
    with ThreadPoolExecutor(max(1, len(rest))) as pool:
        list(pool.map(run, rest))
    return {name: results[name] for name in chosen}


def machine() -> Result:
    """What it ran on."""
    import torch
    import triton

    found: Result = {"torch": torch.__version__, "triton": triton.__version__, "cores": os.cpu_count()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        found["gpus"] = answer.strip().splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        found["gpus"] = str(error)
    return found


def main() -> None:
    """Run, print. Exit status 1 when a section failed."""
    known = sections()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", nargs="+", choices=tuple(known), help="these sections")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all of them")
    options = parser.parse_args()
    if not has_gpu():
        print("Nothing measured: there is no NVIDIA GPU here.")
        print(json.dumps({"sections": {}}))
        return
    console = Console(width=160)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: section for name, section in known.items() if not options.only or name in options.only}
    results = run_all(chosen, options.budget, options.out, console)
    summary = {"machine": machine(), "sections": results}
    table = Table("section", "status", "s", "what came of it", title=str(summary["machine"]["gpus"]), show_lines=True)
    for name, entry in results.items():
        table.add_row(name, entry["status"], str(entry["seconds"]), entry["headline"])
    console.print(table)
    with (options.out / "summary.txt").open("w") as file:
        Console(file=file, width=160).print(table)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    if any(entry["status"] != "ok" for entry in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
