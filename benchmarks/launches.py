"""What does it cost the host to launch the kernels around a step's graph?

Microseconds of one launch of `take_drafts`, `write_ring_entry`, `take_entry` and `finish_reply`: as Triton launches
them, and prepared (`kernels/triton/prepared.py`). The device is left to finish in between, so that no launch waits for
a place in its queue. Prints a table, then one JSON object as the last line. Needs a CUDA device, and says so where
there is none.

    python -m benchmarks.launches [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from kernels.kernel_set import kernel_set
from tests.kernels.triton.form_cases import CASES

DEVICE = "cuda"
# Launches in a row, of which a queue takes a thousand.
LAUNCHES = 200


def host_us(call: Callable[[], object], repeats: int) -> float:
    """Median over the repeats of a launch's mean."""
    times: list[float] = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        times.append((time.perf_counter() - began) / LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def main() -> None:
    """Measure every kernel both ways and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    missing = "no CUDA device" if not torch.cuda.is_available() else "" if find_spec("triton") else "no package triton"
    if missing:
        print(f"Nothing measured: these are launches on a GPU, and there is {missing} here.")
        print(json.dumps({"device": None, "host_us": {}}))
        return
    kernels = kernel_set("triton")
    results: dict[str, dict[str, float]] = {}
    print(f"{'host us of a launch':32}{'ordinary':>10}{'prepared':>10}{'saved':>8}")
    for title, make in CASES.items():
        case = make(DEVICE)
        case.put(1)
        arguments, numbers = case.arguments(1), case.numbers(1)
        form = getattr(kernels.prepare, case.name)(*arguments)
        if form is None:
            raise RuntimeError(f"{case.name} cannot be prepared here")
        ordinary = host_us(partial(getattr(kernels, case.name), *arguments), options.repeats)
        prepared = host_us(partial(form, *numbers), options.repeats)
        results[title] = {"ordinary": round(ordinary, 2), "prepared": round(prepared, 2)}
        print(f"{title:32}{ordinary:10.1f}{prepared:10.1f}{1 - prepared / ordinary:8.0%}", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "host_us": results}))


if __name__ == "__main__":
    main()
