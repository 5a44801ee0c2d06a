"""What do users see when ranks of the target die at random, again and again, under load?

`kill_ranks` keeps requests running while it kills a random rank (rank 0 among them), starts the target anew as a
supervisor does once it has ended by itself, and checks every answer. As a module it does many:
`python -m tests.end_to_end.rank_kills --kills 200`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import ON_DEVICE, Models, prompts

NUM_TOKENS = 80
NUM_STREAMS = 3
END_S = 8.0  # within which the target must have ended by itself: 2 s to notice, and the stop
ANSWER_S = 120.0


@dataclass
class KillReport:
    """Seconds: from a kill until the target has ended by itself (rank 0 killed: not counted)."""

    num_kills: int = 0
    num_requests: int = 0
    num_hangs: int = 0
    longest_end_s: float = 0.0
    seconds: float = 0.0


class _Load:
    """Requests without end on a few streams, each answer checked."""

    def __init__(self, stack: Stack, models: Models) -> None:
        self._stack = stack
        self._models = models
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.num_done = 0
        self.num_tokens = 0
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._streams = [self._pool.submit(self._run) for _ in range(NUM_STREAMS)]

    def _run(self) -> None:
        while not self._stopping.is_set():
            index = next(self._numbers)
            prompt, tokens = prompts()[index % 16], []
            for chunk in self._stack.stream(list(prompt), NUM_TOKENS, ignore_eos=True, draft_len=index % 4):
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += (choice.get("outrider") or {}).get("token_ids", [])
                self.num_tokens += 1
            assert tokens == self._models.greedy(prompt, NUM_TOKENS), f"request {index}"
            with self._lock:
                self.num_done += 1

    def wait_progress(self, deadline_s: float = ANSWER_S) -> None:
        """Until some chunks have come since now."""
        wanted = self.num_tokens + NUM_STREAMS
        end = time.monotonic() + deadline_s
        while self.num_tokens < wanted:
            self.check()
            assert time.monotonic() < end, f"no token within {deadline_s} s"
            time.sleep(0.02)

    def check(self) -> None:
        """Raise what a stream has failed with."""
        for stream in self._streams:
            if stream.done():
                stream.result()

    def finish(self) -> None:
        """Let the requests at hand end."""
        self._stopping.set()
        for stream in self._streams:
            stream.result(ANSWER_S)
        self._pool.shutdown()


def kill_ranks(
    directory: Path,
    models: Models,
    num_kills: int,
    num_ranks: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
    settings: Mapping[str, Any] | None = None,
) -> KillReport:
    """One stack, `num_kills` kills; every fifth or so is a SIGSTOP, which looks like a hang. say: takes progress.
    settings: more of the target's.
    """
    source = random.Random(seed)
    report = KillReport()
    began = time.monotonic()
    target = {"pcp_size": num_ranks, "num_blocks": 200, "block_size": 4, **(settings or {})}
    drafter = {"method": "draft_model", "checkpoint": str(models.root / "noisy"), "max_draft_len": 4}
    gateway = {"target_wait_s": 60, "step_deadline_ms": 300, "reconnect_max_s": 0.05, "depth": 2}
    for index in range(16):
        models.greedy(prompts()[index], NUM_TOKENS)  # the references, before anybody waits for them
    with running_stack(directory, models.target, target, drafter, gateway) as stack:
        load = _Load(stack, models)
        for _ in range(num_kills):
            load.wait_progress()
            time.sleep(source.random() * 0.3)  # anywhere within a step
            process = stack.processes["target"]
            ranks = psutil.Process(process.pid).children(recursive=True)
            assert len(ranks) == num_ranks - 1
            rank = source.randrange(num_ranks)
            if rank == 0:
                stack.kill("target")
            else:
                hang = source.random() < 0.2
                report.num_hangs += hang
                killed = time.monotonic()
                ranks[rank - 1].send_signal(signal.SIGSTOP if hang else signal.SIGKILL)
                try:
                    status = process.wait(END_S)
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"the target goes on without rank {rank}:\n{stack.log('target')}") from None
                assert status == 1, stack.log("target")
                report.longest_end_s = max(report.longest_end_s, time.monotonic() - killed)
            _, orphans = psutil.wait_procs(ranks, timeout=5)
            assert not orphans, orphans
            report.num_kills += 1
            say(f"{report.num_kills} kills, {load.num_done} requests, all right")
            stack.start("target")
        load.wait_progress()
        load.finish()
        report.num_requests = load.num_done
    report.seconds = time.monotonic() - began
    return report


def main() -> None:
    """Kill ranks and print the report, as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4, 8])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--execution", choices=["host", "device"], default="host")
    options = parser.parse_args()
    settings = ON_DEVICE if options.execution == "device" else {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        report = kill_ranks(root, Models(root / "models"), options.kills, options.ranks, options.seed, print, settings)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
