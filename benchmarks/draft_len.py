"""Which draft_len gives the most tokens per second on this machine?

    python -m benchmarks.draft_len [--tokens 128] [--rounds 1] [--config configs/quickstart.yaml]

Starts the stack and asks the prompts of `benchmarks.serve`, greedy, one stream, with each draft_len in turn, so that
a machine whose speed drifts slows all of them alike. Whole-request tokens per second, and as a ratio to draft_len 0
on the same prompt. Every answer must have the same tokens. A table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serve import ROOT, Served, Transformers, fetch

DRAFT_LENS = range(8)


def measure(served: Served, prompts: list[list[int]], num_tokens: int, console: Console) -> list[dict[str, Any]]:
    """One row per draft_len: medians over the prompts. SystemExit if any answer differs from draft_len 0's."""
    served.complete(prompts[0], 16, None)
    speeds: dict[int, list[float]] = {draft_len: [] for draft_len in DRAFT_LENS}
    steps = dict.fromkeys(DRAFT_LENS, 0)
    num_answered = 0
    for index, prompt in enumerate(prompts):
        expected: list[int] = []
        for draft_len in DRAFT_LENS:
            start = time.perf_counter()
            answer = served.complete(prompt, num_tokens, draft_len, ignore_eos=False)
            token_ids = list(answer["choices"][0]["outrider"]["token_ids"])
            speeds[draft_len].append(len(token_ids) / (time.perf_counter() - start))
            expected = expected or token_ids
            if token_ids != expected:
                raise SystemExit(f"prompt {index}: draft_len {draft_len} changed the answer")
            steps[draft_len] += len(token_ids) - answer["usage"]["outrider"]["accepted_tokens"]
        num_answered += len(expected)
        console.print(f"prompt {index + 1} of {len(prompts)}", highlight=False)
    return [
        {
            "draft_len": draft_len,
            "tok_s": round(statistics.median(speeds[draft_len]), 2),
            "over_none": round(statistics.median(a / b for a, b in zip(speeds[draft_len], speeds[0], strict=True)), 3),
            "mean_accepted_len": round(num_answered / steps[draft_len], 3),
        }
        for draft_len in DRAFT_LENS
    ]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    directory = fetch(options.model)
    prompts = Transformers(directory).prompts * options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        served = Served(options.config, directory, Path(scratch))
        try:
            rows = measure(served, prompts, options.tokens, Console(stderr=True))
        finally:
            served.close()
    table = Table("draft_len", "tokens/s", "x draft_len 0", "tokens/step", title=f"{os.cpu_count()} cores, greedy")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("draft_len", "tok_s", "over_none", "mean_accepted_len")))
    Console().print(table)
    best = max(rows, key=lambda row: float(row["over_none"]))
    print(json.dumps({"best": best["draft_len"], "rows": rows, "tokens": options.tokens}))


if __name__ == "__main__":
    main()
