"""What does run-ahead gain over lockstep, on this machine?

    python -m benchmarks.run_ahead [--depths 1 2] [--tokens 64] [--rounds 8] [--config configs/quickstart.yaml]

One stack per `gateway.depth`, all up at once, used in turn and in changing order, so that a machine whose speed drifts
slows all of them alike. Each round, one prompt, greedy: one stream without drafts, one stream with the default
draft_len, eight streams with it. Answers must be the same at every depth. Figures are whole-request tokens per second,
and, per step, the milliseconds that the target spent in no step (`between`): the gateway's round trip in lockstep. What
counts are the ratios, taken round by round. A table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.serve import NUM_STREAMS, PROMPTS, ROOT, Served

WAYS: dict[str, tuple[int, int | None]] = {  # streams, draft_len (None: the config's)
    "one stream, no drafts": (1, 0),
    "one stream, drafting": (1, None),
    "eight streams, drafting": (NUM_STREAMS, None),
}
_STEPS = "outrider_steps_total"
_TARGET = 'outrider_step_seconds_sum{part="total",service="target"}'


def _once(
    served: Served, prompts: list[list[int]], num_tokens: int, draft_len: int | None
) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, milliseconds per step in no step, and the answers."""
    before = served.metrics()
    start = time.perf_counter()
    answers = served.complete_all(prompts, num_tokens, draft_len)
    seconds = time.perf_counter() - start
    after = served.metrics()
    tokens = [list(answer["choices"][0]["outrider"]["token_ids"]) for answer in answers]
    between_ms = (seconds - (after[_TARGET] - before[_TARGET])) / (after[_STEPS] - before[_STEPS]) * 1e3
    return len(prompts) * num_tokens / seconds, between_ms, tokens


def measure(
    stacks: dict[int, Served], prompts: list[list[int]], num_tokens: int, rounds: int, console: Console
) -> dict[str, object]:
    """Speeds and gaps by way and depth, and the ratios to the first depth."""
    speeds: dict[str, dict[int, list[float]]] = {way: {depth: [] for depth in stacks} for way in WAYS}
    gaps: dict[str, dict[int, list[float]]] = {way: {depth: [] for depth in stacks} for way in WAYS}
    identical = True
    for served in stacks.values():
        _once(served, prompts[:1], 8, None)
    for index in range(rounds):
        order = list(stacks) if index % 2 == 0 else list(reversed(stacks))
        for way, (num_streams, draft_len) in WAYS.items():
            chosen = [prompts[(index + stream) % len(prompts)] for stream in range(num_streams)]
            answers = {}
            for depth in order:
                speed, gap, answers[depth] = _once(stacks[depth], chosen, num_tokens, draft_len)
                speeds[way][depth].append(speed)
                gaps[way][depth].append(gap)
            identical &= all(answer == answers[order[0]] for answer in answers.values())
        console.print(f"round {index + 1} of {rounds}")
    first = next(iter(stacks))
    result: dict[str, object] = {"identical": identical, "tokens": num_tokens, "rounds": rounds}
    for way in WAYS:
        for depth in stacks:
            ratios = sorted(a / b for a, b in zip(speeds[way][depth], speeds[way][first], strict=True))
            result[f"{way}, depth {depth}"] = {
                "tok_s": round(statistics.median(speeds[way][depth]), 2),
                "between_ms": round(statistics.median(gaps[way][depth]), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_quartiles": [round(ratios[rounds // 4], 3), round(ratios[-1 - rounds // 4], 3)],
            }
    return result


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    console = Console(stderr=True)
    fetched = subprocess.run(
        [sys.executable, "-m", "engine.fetch", options.model], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    directory = fetched.stdout.strip().splitlines()[-1]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for text in PROMPTS
    ]
    sections = yaml.safe_load(options.config.read_text())
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        stacks = {}
        for depth in options.depths:
            place = Path(scratch) / str(depth)
            place.mkdir()
            sections["gateway"]["depth"] = depth
            (place / "config.yaml").write_text(yaml.safe_dump(sections))
            stacks[depth] = Served(place / "config.yaml", directory, place)
            stack.callback(stacks[depth].close)
        result = measure(stacks, prompts, options.tokens, options.rounds, console)
    table = Table("way", "tokens/s", "between steps, ms", "ratio", "quartiles", title="run-ahead beside lockstep")
    for way, figures in result.items():
        if isinstance(figures, dict):
            table.add_row(way, *(str(figures[key]) for key in ("tok_s", "between_ms", "ratio", "ratio_quartiles")))
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
