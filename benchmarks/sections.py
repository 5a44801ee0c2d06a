"""How are many measurements run as processes of their own, so that one that fails or hangs spoils no other?

A `Section` is a command with a time limit whose output ends with JSON. `report` runs them, keeps what they print, and
ends with one table and one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# compute-sanitizer waits ten seconds for its program to reach the GPU, which an import of torch can outlast; both would
# then wait for each other for ever.
LAUNCH_TIMEOUT_S = 240

# Sections that are no benchmarks: what pytest and compute-sanitizer say at their ends.
SANITIZER_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
PYTEST_SUMMARY = re.compile(r"^.*\d+ (?:passed|failed|skipped).* in .*$", re.MULTILINE)
STOP_S = 15.0
LEAST_S = 15.0  # a section that has less left is not begun

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One process. argv: after this interpreter, or a whole command where `wrapper` comes first. headline: what of its
    JSON goes into the table. timed: nothing else may run beside it. env: added to ours.
    """

    argv: Sequence[str]
    limit_s: float
    headline: Callable[[Result], str]
    wrapper: Sequence[str] = ()
    timed: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


def sanitizer(tool: str, port: int) -> tuple[str, ...]:
    """compute-sanitizer as a prefix of a command. port: the first that it may listen at; those that run side by side
    keep ten or more apart.
    """
    return (
        *("compute-sanitizer", "--tool", tool, "--target-processes", "application-only"),
        *("--launch-timeout", str(LAUNCH_TIMEOUT_S), "--port", str(port), "--error-exitcode", "9"),
    )


def summary_line(result: Result) -> str:
    """The headline of a section that ends with what pytest or compute-sanitizer say instead of JSON."""
    return str(result.get("line", ""))


def run_section(name: str, section: Section, limit_s: float, out: Path, env: Mapping[str, str]) -> Result:
    """Run one; its output in `out`. Never raises for what the section does."""
    wrapper = [*section.wrapper]
    if wrapper and shutil.which(wrapper[0]) is None:
        return {"status": f"no {wrapper[0]} here", "seconds": 0.0, "headline": "", "result": None}
    start = time.monotonic()
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()]),
        **section.env,
        **env,
    }
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
        found = [*PYTEST_SUMMARY.findall(text)[-1:], *SANITIZER_SUMMARY.findall(text)[-1:]]
        result = {"line": "; ".join(line.strip("= ") for line in found)} if found else None
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


def run_all(
    chosen: dict[str, Section], budget_s: float, out: Path, console: Console, beside: Mapping[str, str] | None = None
) -> dict[str, Result]:
    """The timed ones in turn; then the others, side by side. beside: an environment in which those disturb nobody: they
    run meanwhile.
    """
    end = time.monotonic() + budget_s
    results: dict[str, Result] = {}

    def run(name: str, env: Mapping[str, str]) -> None:
        left = end - time.monotonic()
        if left < LEAST_S:
            results[name] = {"status": "no time left", "seconds": 0.0, "headline": "", "result": None}
        else:
            results[name] = run_section(name, chosen[name], min(chosen[name].limit_s, left), out, env)
        entry = results[name]
        console.print(f"{name}: {entry['status']}, {entry['seconds']} s. {entry['headline']}", highlight=False)

    rest = [name for name, section in chosen.items() if not section.timed]
    with ThreadPoolExecutor(max(1, len(rest))) as pool:
        others = [pool.submit(run, name, beside) for name in rest] if beside is not None else []
        for name, section in chosen.items():
            if section.timed:
                run(name, {})
        others = others or [pool.submit(run, name, {}) for name in rest]
        for other in others:
            other.result()
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
    except FileNotFoundError:
        found["gpus"] = "no GPU"
    except (OSError, subprocess.SubprocessError) as error:
        found["gpus"] = str(error)
    return found


def report(
    known: dict[str, Section],
    only: Sequence[str] | None,
    budget_s: float,
    out: Path,
    beside: Mapping[str, str] | None = None,
) -> bool:
    """Run the sections (`run_all`), print and keep everything. Returns whether all of them went well."""
    console = Console(width=160)
    out.mkdir(parents=True, exist_ok=True)
    chosen = {name: section for name, section in known.items() if not only or name in only}
    results = run_all(chosen, budget_s, out, console, beside)
    summary = {"machine": machine(), "sections": results}
    table = Table("section", "status", "s", "what came of it", title=str(summary["machine"]["gpus"]), show_lines=True)
    for name, entry in results.items():
        table.add_row(name, entry["status"], str(entry["seconds"]), entry["headline"])
    console.print(table)
    with (out / "summary.txt").open("w") as file:
        Console(file=file, width=160).print(table)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return all(entry["status"] == "ok" for entry in results.values())
