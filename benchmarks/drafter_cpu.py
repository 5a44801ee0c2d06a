"""How long does a draft proposal take on this CPU?

EAGLE-3 at SmolLM2's shape (hidden 576, MLP 1536, 9 query and 3 KV heads of 64, vocabulary 49,152), random weights:
the whole step of the drafter after the ring entry is there (prefill of the step's tokens, K draft steps), for several
batches and draft vocabularies; and prompt lookup on a long text. Prints a table, then one JSON object as its last line.

`python -m benchmarks.drafter_cpu [--threads N] [--rounds N]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from drafter_service.eagle3.checkpoint import random_head
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import Admission
from drafter_service.ngram import NgramSpeculator
from drafter_service.residency import Residents
from drafter_service.settings import CacheSettings
from drafter_service.speculator import DraftBatch, DraftRow, Speculator
from engine.channel.interface import RingEntry

HIDDEN, VOCAB, CONTEXT, DRAFT_LEN, QUERY_LEN = 576, 49_152, 512, 4, 5
TARGET_MS = 15.0  # batch 1, K = 4, two threads


def make_speculator(draft_vocab_size: int) -> Eagle3Speculator:
    """A packed random head of SmolLM2's shape."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=HIDDEN,
        rope={"rope_type": "default", "rope_theta": 100_000.0},
        max_len=8192,
    )
    head = random_head(config, torch.float32, torch.device("cpu"), seed=0)
    head.attach_embedding(torch.randn(VOCAB, HIDDEN))
    head.pack()
    settings = CacheSettings(num_seats=32, max_tokens=4096, max_draft_len=7, block_size=16, num_blocks=4096)
    return Eagle3Speculator(head, (1, 14, 26), settings)


class Steps:
    """The steps of `num_rows` requests at CONTEXT tokens: one prompt each, then verify rows of which 2 are accepted."""

    def __init__(self, speculator: Speculator, num_rows: int) -> None:
        self._speculator = speculator
        residents = Residents(num_rows)
        generator = torch.Generator().manual_seed(1)
        self._rows = []
        for index in range(num_rows):
            prompt = tuple(torch.randint(0, VOCAB, (CONTEXT,), generator=generator).tolist())
            resident = residents.add(Admission(f"r{index}", 1, prompt, CONTEXT, 8192, "c"), 1)
            assert resident is not None
            speculator.admit(resident)
            self._rows.append(resident)
            self._propose([index], CONTEXT, 0, 0)
        self.context = CONTEXT

    def step(self) -> None:
        """One verify step of all rows, and the drafts after it."""
        rejected = QUERY_LEN - 3
        self._propose(range(len(self._rows)), QUERY_LEN, rejected, self.context)
        self.context += QUERY_LEN - rejected

    def _propose(self, indices: range | list[int], query_len: int, rejected: int, context: int) -> None:
        count = len(indices)
        num_tokens = count * query_len
        ids = torch.randint(0, VOCAB, (num_tokens,))
        entry = RingEntry(
            seq=1,
            num_rows=count,
            num_tokens=num_tokens,
            hidden=torch.randn(num_tokens, 3 * HIDDEN),
            positions=(torch.arange(query_len) + context).repeat(count),
            input_ids=ids,
            query_start_loc=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32),
            seq_lens=torch.full((count,), context + query_len, dtype=torch.int32),
            seats=torch.arange(count, dtype=torch.int32),
            num_sampled=torch.full((count,), query_len - rejected, dtype=torch.int32),
            num_rejected=torch.full((count,), rejected, dtype=torch.int32),
            anchors=torch.randint(0, VOCAB, (count,)),
            next_prompt_tokens=torch.full((count,), -1),
            temperatures=torch.zeros(count),
            seeds=torch.zeros(count, dtype=torch.int64),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            block_tables=torch.empty(0, dtype=torch.int32),
        )
        rows = []
        for row, index in enumerate(indices):
            resident = self._rows[index]
            accepted = ids[row * query_len : (row + 1) * query_len - rejected].tolist()
            resident.observe(context, accepted, int(entry.anchors[row]))
            rows.append(
                DraftRow(
                    row, resident, row * query_len, query_len, context, rejected, int(entry.anchors[row]), -1, DRAFT_LEN
                )
            )
        self._speculator.propose(DraftBatch(entry, tuple(rows), VOCAB))


def measure(step: Callable[[], None], rounds: int) -> tuple[float, float]:
    """(median, fastest) milliseconds of a step, after a few that do not count."""
    for _ in range(3):
        step()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("method", "draft vocabulary", "rows", "median ms", "fastest ms")
    results = []
    for draft_vocab_size in (4096, 8192):
        for num_rows in (1, 8, 16):
            steps = Steps(make_speculator(draft_vocab_size), num_rows)
            median, fastest = measure(steps.step, options.rounds)
            results.append(("eagle3", draft_vocab_size, num_rows, median, fastest))
    for num_rows in (1, 16):
        steps = Steps(NgramSpeculator(2, 4, 7), num_rows)
        median, fastest = measure(steps.step, options.rounds)
        results.append(("ngram", VOCAB, num_rows, median, fastest))
    for method, vocab, num_rows, median, fastest in results:
        table.add_row(method, str(vocab), str(num_rows), f"{median:.2f}", f"{fastest:.2f}")
    console = Console()
    console.print(f"one proposal: {QUERY_LEN}-token rows at {CONTEXT} tokens of context, K = {DRAFT_LEN}, ", end="")
    console.print(f"{options.threads} threads, {options.rounds} rounds")
    console.print(table)
    batch_one = {str(vocab): median for method, vocab, rows, median, _ in results if method == "eagle3" and rows == 1}
    print(
        json.dumps(
            {
                "threads": options.threads,
                "rows": [
                    dict(zip(("method", "draft_vocab", "rows", "median_ms", "fastest_ms"), row, strict=True))
                    for row in results
                ],
                "eagle3_batch_1_ms": batch_one,
                "target_ms": TARGET_MS,
                "within_target": all(median <= TARGET_MS for median in batch_one.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
