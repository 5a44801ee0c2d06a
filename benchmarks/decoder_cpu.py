"""How long does one forward of the decoder take on this CPU, and does it lose to transformers'?

Rows of 1, 2 and 5 tokens, batches of decode and of verify rows, and prompt chunks, most after a prefix in the cache.
Prints a table, then one JSON object as the last line. Figures are medians of interleaved rounds, in milliseconds, from
token ids to logits.

    python -m benchmarks.decoder_cpu [--model NAME] [--threads N] [--rounds N] [--only CASE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from engine.decoder import Decoder
from engine.fetch import fetch_model
from tests.engine.batches import BatchRunner


@dataclass(frozen=True, slots=True)
class Case:
    """rows: how many; query_len: tokens of each; prefix: tokens of each in the cache already."""

    name: str
    rows: int
    query_len: int
    prefix: int


CASES = (
    Case("decode_1x1_prefix_128", 1, 1, 128),
    Case("verify_1x2_prefix_128", 1, 2, 128),
    Case("verify_1x5_prefix_128", 1, 5, 128),
    Case("verify_1x8_prefix_128", 1, 8, 128),
    Case("decode_1x1_prefix_2048", 1, 1, 2048),
    Case("verify_1x5_prefix_2048", 1, 5, 2048),
    Case("decode_8x1_prefix_128", 8, 1, 128),
    Case("verify_8x5_prefix_128", 8, 5, 128),
    Case("decode_32x1_prefix_128", 32, 1, 128),
    Case("prefill_1x128", 1, 128, 0),
    Case("prefill_1x512", 1, 512, 0),
)


def random_ids(num: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a seed, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (num,), generator=generator).tolist()


def decoder_step(decoder: Decoder, case: Case) -> Callable[[], None]:
    """One step of the case, planning included, that can be run again and again: the lengths are set back each time."""
    max_len = case.prefix + case.query_len
    runner = BatchRunner(decoder, case.rows, max_len, block_size=16, shuffle=False)
    vocab_size = decoder.config.vocab_size
    if case.prefix:
        for seat in range(case.rows):
            runner.step([(seat, random_ids(case.prefix, vocab_size, seat))])
    rows = [(seat, random_ids(case.query_len, vocab_size, 100 + seat)) for seat in range(case.rows)]

    def step() -> None:
        decoder.logits(runner.step(rows).hidden)
        for seat, _ in rows:
            runner.rewind(seat, case.prefix)

    return step


def transformers_step(model: PreTrainedModel, case: Case) -> Callable[[], None]:
    """The same rows as one padded-free batch of transformers' own forward."""
    vocab_size = model.config.vocab_size
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([random_ids(case.query_len, vocab_size, 100 + seat) for seat in range(case.rows)])
    if case.prefix:
        prefix = torch.tensor([random_ids(case.prefix, vocab_size, seat) for seat in range(case.rows)])
        model(prefix, cache=cache)

    def step() -> None:
        model(ids, cache=cache)
        cache.crop(-case.query_len)  # drop the step's tokens

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, run in turn so that a slow moment of the machine touches all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_index >= 2:  # the first rounds warm up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], help="just these cases")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    directory = fetch_model(options.model, console=console)
    decoder = Decoder.load(directory, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    table = Table(
        "case", "outrider ms", "transformers ms", "ratio", title=f"{options.model}, {options.threads} threads"
    )
    result: dict[str, dict[str, float]] = {}
    cases = [case for case in CASES if not options.only or case.name in options.only]
    with torch.inference_mode():
        for case in track(cases, "Measuring", console=console):
            steps = {"outrider": decoder_step(decoder, case), "transformers": transformers_step(model, case)}
            rounds = max(3, options.rounds // 2) if case.query_len > 100 else options.rounds
            times = measure(steps, rounds)
            ratio = times["transformers"] / times["outrider"]
            result[case.name] = {
                "outrider_ms": round(times["outrider"], 2),
                "transformers_ms": round(times["transformers"], 2),
                "speedup": round(ratio, 2),
            }
            table.add_row(case.name, *(f"{value:.2f}" for value in result[case.name].values()))
    Console().print(table)
    print(json.dumps({"model": options.model, "threads": options.threads, "dtype": "float32", "cases": result}))


if __name__ == "__main__":
    main()
