"""What do several GPUs of one host give: ranks over NCCL, and a drafter on a GPU of its own?

    python -m benchmarks.multi_gpu --out benchmarks/results/multi [--gpus 2] [--only hop step-across]

In one run, each a process of its own with a time limit: a target of 1, 2, ... ranks (same tokens; a Llama shape of 8
billion parameters: prompts of 2k, 16k and 64k, decode steps of 1 to 256 rows, time in collectives, speed-up); a hop
from one GPU to another through CUDA IPC memory and flags; steps with the drafter on the second GPU beside the same code
in one process, and with two halves of the rows in turn; the drafter, then the target killed under load with a GPU for
each; steps of two ranks with a drafter beside the first. Raw output and JSON under `--out`, a table, then JSON. NVLink
multicast stays off. `--dry-run` does all of it on the CPU, with tiny shapes, over gloo and shared memory, to try the
script.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.gpu import HEAD_SHAPE, SHAPE, hop_headline, step_headline
from benchmarks.sections import ROOT, Result, Section, report, summary_line
from benchmarks.shared_gpu import has_gpu

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
FAULTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "tests/gpu/test_faults_gpu.py")


def pcp_headline(result: Result) -> str:
    parts = []
    for name, unit in (("prefill", "tokens"), ("verify", "rows")):
        for amount, by_size in result[name].items():
            times = " / ".join(f"{entry['ms']:.1f}" for entry in by_size.values())
            gains = " / ".join(f"{entry['speed_up']:.2f}" for entry in by_size.values())
            parts.append(f"{amount} {unit}: {times} ms, x {gains}")
    return f"same tokens {result['same_tokens']}; " + "; ".join(parts)


def real(num_gpus: int, execution: str) -> dict[str, Section]:
    """On GPUs 0 .. num_gpus - 1. execution: of the ranks."""
    sizes = [str(size) for size in (1, 2, 4, 8) if size <= num_gpus]
    shape = ("--model", SHAPE, "--load-format", "dummy")
    across = ("--device", "cuda:0", "--drafter-device", "cuda:1", "--head", HEAD_SHAPE, "--accept", "2.5")
    beside = ("--device", "cuda:0", "--drafter-device", "cuda:0", "--pcp-size", "2")
    return {
        "hop": Section(("-m", "benchmarks.hop", "--devices", "cuda:0", "cuda:1"), 60, hop_headline, env=NO_MULTICAST),
        "pcp": Section(
            ("-m", "benchmarks.pcp_steps", *shape, "--sizes", *sizes, "--execution", execution),
            260,
            pcp_headline,
            env=NO_MULTICAST,
        ),
        "step-across": Section(
            ("-m", "benchmarks.step", *shape, *across, "--batches", "1", "16", "64", "--ways", "acde", "--rounds", "1"),
            150,
            step_headline,
            env=NO_MULTICAST,
        ),
        "faults-across": Section(
            FAULTS, 120, summary_line, env={**NO_MULTICAST, "OUTRIDER_TEST_DRAFTER_DEVICE": "cuda:1"}
        ),
        "step-ranks": Section(
            (
                *("-m", "benchmarks.step", *shape, *beside),
                *("--head", HEAD_SHAPE, "--accept", "2.5", "--batches", "16", "64", "--ways", "ad", "--rounds", "1"),
            ),
            120,
            step_headline,
            env=NO_MULTICAST,
        ),
    }


def dry(execution: str) -> dict[str, Section]:
    """The same on a CPU."""
    cpu = ("--device", "cpu", "--dtype", "float32", "--context", "64")
    return {
        "hop": Section(
            ("-m", "benchmarks.hop", "--devices", "simulated", "simulated", "--rounds", "10", "--repeats", "2"),
            60,
            hop_headline,
        ),
        "pcp": Section(
            (
                *("-m", "benchmarks.pcp_steps", *cpu, "--prompts", "64", "200", "--batches", "1", "4"),
                *("--steps", "12", "--repeats", "2", "--max-step-tokens", "96", "--execution", execution),
            ),
            200,
            pcp_headline,
        ),
        "step-across": Section(
            ("-m", "benchmarks.step", *cpu, "--batches", "4", "--ways", "ade", "--rounds", "1", "--steps", "24"),
            120,
            step_headline,
        ),
        "faults-across": Section(FAULTS, 200, summary_line, env={"OUTRIDER_TEST_DEVICE": "cpu"}),
        "step-ranks": Section(
            (
                *("-m", "benchmarks.step", *cpu, "--batches", "4", "--ways", "ad", "--rounds", "1", "--steps", "24"),
                *("--pcp-size", "2"),
            ),
            120,
            step_headline,
        ),
    }


def main() -> None:
    """Run, print. Exit status 1 when a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "multi")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=tuple(dry("host")), help="these sections")
    parser.add_argument("--execution", choices=("host", "device"), default="device", help="of the ranks")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all of them")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if not options.dry_run and (options.gpus < 2 or not has_gpu()):
        print("Nothing measured: this needs two NVIDIA GPUs or more; --dry-run tries the script without.")
        print(json.dumps({"sections": {}}))
        return
    sections = dry(options.execution) if options.dry_run else real(options.gpus, options.execution)
    if not report(sections, options.only, options.budget, options.out):
        sys.exit(1)


if __name__ == "__main__":
    main()
