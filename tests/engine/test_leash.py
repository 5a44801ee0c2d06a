"""A process that is tied to its parent ends with it, in each of the ways there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIED = """
import sys, threading
from engine.leash import tie_to_parent
tie_to_parent(int(sys.argv[1]), 0, 7)
print("tied", flush=True)
threading.Event().wait(60)
"""


def start(parent_pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TIED, str(parent_pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_end_of_the_pipe_ends_it() -> None:
    with start(os.getpid()) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "tied\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) == 7


def test_a_parent_that_is_gone_already_ends_it() -> None:
    with start(1 << 22) as process:
        assert process.wait(20) == 7
