"""The cuda_ipc channel between two processes on a real GPU: data, order, and either of them killed.

With OUTRIDER_TEST_DEVICE=cpu the same runs on simulated devices. OUTRIDER_TEST_PEER_DEVICE: a GPU of the drafter's own.
Each test prints what its processes did and when, on one clock; where one stands still, the failure has its stacks.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from benchmarks.shared_gpu import PIPE_DIRECTORY
from tests.gpu.fleet import DEVICE, NEEDS_GPU
from tests.processes import ProcessGroup, TestProcess

pytestmark = [NEEDS_GPU, pytest.mark.timeout(40)]

PEER = "tests.engine.channel.device_peer"
OURS = "simulated" if DEVICE == "cpu" else "cuda:0"
THEIRS = os.environ.get("OUTRIDER_TEST_PEER_DEVICE", OURS)
# Of a test, process starts included; it must be over, and have said why, before pytest's own limit.
TEST_S = 20.0 if DEVICE != "cpu" else 35.0
STACKS_AFTER_S = TEST_S - 7.0
NOTICED_S = 3.0
LINE_LEN = 160  # of what is shown


class Pair:
    """A target and the drafters that attach to it. All are started at once, since that takes longest."""

    def __init__(self, processes: ProcessGroup, env: dict[str, str], directory: Path) -> None:
        self._processes = processes
        self._env = {**env, "OUTRIDER_TEST_STACKS_AFTER_S": str(STACKS_AFTER_S)}
        self._directory = directory
        self._started: dict[str, TestProcess] = {}
        self._ends = time.monotonic() + TEST_S

    def target(self, *arguments: str) -> None:
        self._start("target", OURS, *arguments)

    def drafter(self, name: str, mode: str) -> None:
        self._start(name, THEIRS, mode, f"@{self._directory / name}")

    def tell(self, name: str, word: str) -> None:
        """Give a drafter the description that it waits for."""
        unfinished = self._directory / f"{name}.unfinished"
        unfinished.write_text(word)
        unfinished.rename(self._directory / name)

    def line(self, name: str, pattern: str) -> re.Match[str]:
        """Wait for the line; a failure shows what every process printed, and its stacks if it stands still."""
        try:
            return self._started[name].wait_for_line(pattern, max(0.0, self._ends - time.monotonic()))
        except AssertionError as error:
            why = str(error).partition(" Output:")[0]
            raise AssertionError(f"{name}: {why}\n{self.output()}") from None

    def kill(self, name: str) -> None:
        start = time.monotonic()
        self._started[name].kill()
        print(f"# {start:.3f} the test kills {name}, which is gone after {time.monotonic() - start:.3f} s")

    def end(self, name: str) -> None:
        """Wait for it to end by itself."""
        start = time.monotonic()
        assert self._started[name].wait(max(0.1, self._ends - start)) == 0, self.output()
        print(f"# {time.monotonic():.3f} {name} has ended, {time.monotonic() - start:.3f} s after it was asked for")

    def output(self) -> str:
        """What all of them have printed."""
        parts = []
        for name, process in self._started.items():
            parts += [f"--- {name}", *(line[:LINE_LEN] for line in process.output.splitlines())]
        return "\n".join(parts)

    def _start(self, name: str, device: str, *arguments: str) -> None:
        self._started[name] = self._processes.python("-m", PEER, device, *arguments, env=self._env)


@pytest.fixture(params=["alone", "mps"])
def pair(request: pytest.FixtureRequest, processes: ProcessGroup, tmp_path: Path) -> Pair:
    """Both processes with the GPU in turn, or at once under MPS."""
    if request.param == "alone":
        return Pair(processes, {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}, tmp_path)
    if DEVICE == "cpu":
        pytest.skip("MPS is for GPUs")
    env: dict[str, str] = request.getfixturevalue("mps")
    if not env and PIPE_DIRECTORY not in os.environ:  # a daemon that was there before is as good
        pytest.skip("no MPS daemon could be started")
    return Pair(processes, env, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_crosses_both_ways_in_order(pair: Pair, dtype: str) -> None:
    pair.target("lead", dtype)
    pair.drafter("drafter", "answer")
    pair.tell("drafter", pair.line("target", "^next channel (.*)$")[1])
    assert pair.line("drafter", "^read absent=.*$")[0] == "read absent=0 wrong=0"
    assert pair.line("target", "^read absent=.*$")[0] == "read absent=0 wrong=0"
    for name in ("drafter", "target"):
        pair.line(name, "^ended True$")
        assert pair.line(name, r"^held (\d+)$")[1] == "0", pair.output()
        pair.end(name)


def test_a_killed_drafter_hangs_nothing_and_leaks_nothing(pair: Pair) -> None:
    pair.target("lead-twice", "bfloat16")
    pair.drafter("first", "mute")
    pair.drafter("second", "answer")
    pair.tell("first", pair.line("target", "^channel (.*)$")[1])
    pair.line("first", "^attached$")
    pair.line("target", "^waiting$")
    pair.kill("first")
    released = pair.line("target", r"^released after ([\d.]+) s absent=(\d)$")
    assert float(released[1]) < NOTICED_S, pair.output()
    assert released[2] == "1"
    assert float(pair.line("target", r"^went on for ([\d.]+) s ")[1]) < NOTICED_S, pair.output()
    pair.line("target", "^first ended True$")
    pair.tell("second", pair.line("target", "^next channel (.*)$")[1])
    assert pair.line("second", "^read absent=.*$")[0] == "read absent=0 wrong=0"
    assert pair.line("target", "^read absent=.*$")[0] == "read absent=0 wrong=0"
    for name in ("second", "target"):
        pair.line(name, "^ended True$")
        assert pair.line(name, r"^held (\d+)$")[1] == "0", pair.output()
        pair.end(name)
    print(pair.output())


def test_a_killed_target_hangs_nothing(pair: Pair) -> None:
    pair.target("target")
    pair.drafter("drafter", "follow")
    pair.tell("drafter", pair.line("target", "^channel (.*)$")[1])
    assert pair.line("drafter", "^followed .*$")[0] == "followed absent=0 wrong=0"
    pair.line("drafter", "^waiting$")
    pair.kill("target")
    released = pair.line("drafter", r"^released after ([\d.]+) s absent=(\d)$")
    assert float(released[1]) < NOTICED_S, pair.output()
    # The memory of the dead is still mapped: reading it must harm nobody.
    pair.line("drafter", r"^again absent=\d wrong=0$")
    pair.line("drafter", "^ended True$")
    assert pair.line("drafter", r"^held (\d+)$")[1] == "0", pair.output()
    pair.end("drafter")
    print(pair.output())
