"""What are all the figures of a GPU, with one command?

    make bench-gpu        or        python -m benchmarks.gpu --out benchmarks/results [--only step-8b serve]

Runs every measurement of this folder that needs a GPU, each as a process of its own with a time limit: one that fails
is reported and the rest goes on. Raw output goes to `--out` as NAME.txt, the JSON that each ends with as NAME.json;
then one table of headlines, and all of it as summary.json, whose text is also the last line. The compute-sanitizer
sections run side by side, since nothing is timed there: on a second GPU where there is one, else last. About ten
minutes on an H200; sections for which `--budget` leaves no time are not run, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.sections import ROOT, Result, Section, report, sanitizer, summary_line
from benchmarks.shared_gpu import has_gpu

SHAPE, HEAD_SHAPE = "configs/shapes/llama-3-8b", "configs/shapes/llama-3-8b-eagle3"
KERNEL_TESTS = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "small"),
    *("tests/gpu/test_kernels_gpu.py", "tests/gpu/test_step_kernels_gpu.py", "tests/gpu/test_prepared_gpu.py"),
)


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


def launches_headline(result: Result) -> str:
    return "; ".join(
        f"{name}: {figures['ordinary']:.0f} us, prepared {figures['prepared']:.1f}"
        for name, figures in result["host_us"].items()
    )


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


def profile_headline(result: Result) -> str:
    return (
        f"GPU busy {100 * result['gpu_busy']:.1f} %, drafting {result['drafting_us']} us in "
        f"{result['drafting_launches']} launches, copies to the host on the way: "
        f"{result['copies_to_host_while_drafting']}; a step has {result['per_step']}"
    )


def sanitized_headline(result: Result) -> str:
    passes = [
        f"{name}: errors {each['errors']}, {each['steps']} steps, {each['missed']} missed"
        for name, each in result.items()
        if name != "tool"
    ]
    return f"{result['tool']}, " + "; ".join(passes)


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
        "profile-8b": Section(("-m", "benchmarks.step_profile", *shape), 60, profile_headline),
        "serve": Section(("-m", "benchmarks.serve_gpu"), 140, serve_headline),
        "drafter-kill": Section(("-m", "benchmarks.drafter_kill"), 80, kill_headline),
        "kernels": Section(("-m", "benchmarks.kernels", "--repeats", "15"), 90, kernels_headline),
        "launches": Section(("-m", "benchmarks.launches"), 30, launches_headline),
        "memcheck-kernels": Section(KERNEL_TESTS, 240, summary_line, sanitizer("memcheck", 50_152), timed=False),
        "racecheck-kernels": Section(KERNEL_TESTS, 240, summary_line, sanitizer("racecheck", 51_152), timed=False),
        "memcheck-served": Section(("-m", "benchmarks.sanitized_step"), 300, sanitized_headline, timed=False),
    }


def second_gpu() -> dict[str, str] | None:
    """The environment in which a process has that GPU and no other; None where there is one, or somebody chose."""
    import torch

    if "CUDA_VISIBLE_DEVICES" in os.environ or torch.cuda.device_count() < 2:
        return None
    return {"CUDA_VISIBLE_DEVICES": "1"}


def main() -> None:
    """Run, print. Exit status 1 when a section failed."""
    known = sections()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", nargs="+", choices=tuple(known), help="these sections")
    parser.add_argument("--budget", type=float, default=840.0, help="seconds for all of them")
    options = parser.parse_args()
    if not has_gpu():
        print("Nothing measured: there is no NVIDIA GPU here.")
        print(json.dumps({"sections": {}}))
        return
    if not report(known, options.only, options.budget, options.out, second_gpu()):
        sys.exit(1)


if __name__ == "__main__":
    main()
