"""What do streams on a GPU see when the drafter is killed under load, and when it comes back?

    python -m benchmarks.drafter_kill [--model NAME] [--head NAME] [--streams 4] [--device cuda]

A whole stack; streams with drafts run, the drafter gets SIGKILL, the streams go on without drafts, the drafter is
started again. Reported: the longest silence of any stream after the kill, the time between two commits once one
deadline has passed beside that of streams that never drafted (their ratio should be 1), the time from the restart to
the first accepted draft, and the GPU memory before the kill and after the return. Tokens must be those of an
undisturbed run. A table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.floor import BusySampler
from benchmarks.shared_gpu import has_gpu, shared_gpu
from engine.fetch import fetch_model
from tests.end_to_end.stack import Stack, running_stack

DEADLINE_MS = 300
PATIENCE_S = 120.0


@dataclass
class Watched:
    """One stream, read by a thread: when each chunk came, and what was in it."""

    stack: Stack
    prompt: list[int]
    num_tokens: int
    draft_len: int
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_from_draft: int = 0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._enough = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            chunks = self.stack.stream(self.prompt, self.num_tokens, draft_len=self.draft_len, ignore_eos=True)
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    extension = choice.get("outrider") or {}
                    if extension.get("token_ids"):
                        with self._enough:
                            self.times.append(time.perf_counter())
                            self.token_ids += extension["token_ids"]
                            self.num_from_draft += sum(extension["from_draft"])
                            self._enough.notify_all()
        except BaseException as error:  # the main thread reports it
            self.error = error

    def wait_tokens(self, count: int) -> None:
        with self._enough:
            if not self._enough.wait_for(lambda: len(self.token_ids) >= count or self.error is not None, PATIENCE_S):
                raise TimeoutError(f"{len(self.token_ids)} of {count} tokens")

    def finish(self) -> None:
        self._thread.join(PATIENCE_S)
        if self.error is not None:
            raise self.error
        if self._thread.is_alive():
            raise TimeoutError(f"a stream hangs at {len(self.token_ids)} tokens")

    def gaps_ms(self, start: float, end: float) -> list[float]:
        """Between two chunks, both of them in that time."""
        inside = [moment for moment in self.times if start <= moment <= end]
        return [1e3 * (after - before) for before, after in pairwise(inside)]


def run_streams(stack: Stack, prompts: list[list[int]], num_tokens: int, draft_len: int) -> list[Watched]:
    return [Watched(stack, prompt, num_tokens, draft_len) for prompt in prompts]


def median_gap_ms(streams: list[Watched], start: float, end: float) -> float | None:
    gaps = [gap for stream in streams for gap in stream.gaps_ms(start, end)]
    return round(statistics.median(gaps), 3) if gaps else None


def measure(
    stack: Stack, prompts: list[list[int]], num_tokens: int, draft_len: int, gpu: BusySampler
) -> dict[str, Any]:
    """The figures of the module's first paragraph."""
    plain = run_streams(stack, prompts, num_tokens, 0)
    for stream in plain:
        stream.finish()
    expected = [stream.token_ids for stream in plain]
    # The last half, when all of them decode.
    begin, end = plain[0].times[len(plain[0].times) // 2], min(stream.times[-1] for stream in plain)
    undrafted_ms = median_gap_ms(plain, begin, end)
    drafting = run_streams(stack, prompts, num_tokens, draft_len)
    for stream in drafting:
        stream.finish()
    drafting_ms = median_gap_ms(drafting, drafting[0].times[len(drafting[0].times) // 2], drafting[0].times[-1])
    memory_before = gpu.memory_used()

    streams = run_streams(stack, prompts, num_tokens, draft_len)
    for stream in streams:
        stream.wait_tokens(num_tokens // 6)
    killed = time.perf_counter()
    stack.kill("drafter")
    for stream in streams:
        stream.finish()
    ends = min(stream.times[-1] for stream in streams)
    silence = [max((gap for gap in stream.gaps_ms(killed - 0.05, stream.times[-1])), default=0.0) for stream in streams]
    settled_ms = median_gap_ms(streams, killed + DEADLINE_MS / 1e3, ends)

    started = time.perf_counter()
    stack.start("drafter")
    while True:
        answer = stack.complete(prompts[0], 24, draft_len=draft_len, ignore_eos=True)
        if answer["usage"]["outrider"]["drafted_tokens"]:
            break
        if time.perf_counter() - started > PATIENCE_S:
            raise TimeoutError("drafting did not come back")
    back_s = time.perf_counter() - started
    again = run_streams(stack, prompts, num_tokens, draft_len)
    for stream in again:
        stream.finish()
    memory_after = gpu.memory_used()
    return {
        "undrafted_ms": undrafted_ms,
        "drafting_ms": drafting_ms,
        "settled_ms": settled_ms,
        "settled_over_undrafted": round(settled_ms / undrafted_ms, 3) if settled_ms and undrafted_ms else None,
        "longest_silence_ms": round(max(silence), 1),
        "deadline_ms": DEADLINE_MS,
        "back_after_s": round(back_s, 2),
        "identical": all([stream.token_ids for stream in group] == expected for group in (drafting, streams, again)),
        "memory_mib": [value >> 20 if value is not None else None for value in (memory_before, memory_after)],
    }


def main() -> None:
    """Parse, run, print. Exit status 1: tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="smollm2-135m-instruct-eagle3")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--dtype", default="float32", help="float32: batches of other sizes give the same tokens")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--draft-len", type=int, default=4)
    options = parser.parse_args()
    cuda = options.device != "cpu"
    both: dict[str, Any] = {"device": options.device, "attention": "triton"} if cuda else {}
    both["dtype"] = options.dtype
    source = random.Random(3)
    prompts = [[source.randrange(100, 20_000) for _ in range(24)] for _ in range(options.streams)]
    drafter = {"method": "eagle3", "checkpoint": options.head, "max_draft_len": options.draft_len, **both}
    gateway = {"depth": 3, "step_deadline_ms": DEADLINE_MS, "reconnect_max_s": 0.05}
    target = {**both, "num_blocks": 4096}
    with tempfile.TemporaryDirectory() as scratch, shared_gpu(torch.device(options.device)):
        with running_stack(Path(scratch), fetch_model(options.model), target, drafter, gateway) as stack:
            result = measure(stack, prompts, options.tokens, options.draft_len, BusySampler(0 if cuda else None))
    table = Table("figure", "value", title=f"drafter killed under {options.streams} streams, {options.dtype}")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), str(value))
    Console(width=100).print(table)
    print(json.dumps({**result, "device": options.device, "streams": options.streams, "tokens": options.tokens}))
    if not result["identical"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
