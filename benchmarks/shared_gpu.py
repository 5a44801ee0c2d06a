"""How do a benchmark's processes share one GPU?

Under a Multi-Process Service daemon of its own, as `outrider up` has one (gateway/stack/mps_guard.py): kernels of
several processes then need no context switch between them, nobody else's daemon is touched, no setting of the device is
changed, and the daemon ends when this process does. Without one everything works, an order of magnitude slower from one
process to the other.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gateway.stack import mps_guard

ANSWER_S = 2 * mps_guard.START_S + 5.0
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without initialising CUDA: a process joins a daemon at that moment, or never."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


@contextmanager
def shared_gpu(device: torch.device) -> Iterator[dict[str, str]]:
    """Inside, this process (if it has not used CUDA yet) and its children share the GPU through a daemon.

    Yields the environment that says so, which is in ours too meanwhile: empty on a CPU, where no daemon started, and
    where there is one already.
    """
    if device.type != "cuda" or PIPE_DIRECTORY in os.environ:
        yield {}
        return
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(mps_guard.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    env = _wait_ready(guard)
    os.environ.update(env)
    try:
        yield env
    finally:
        for key in env:
            del os.environ[key]
        assert guard.stdin is not None  # both were asked for
        assert guard.stdout is not None
        guard.stdin.close()
        guard.stdout.close()
        try:
            guard.wait(mps_guard.QUIT_S + 10.0)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def _wait_ready(guard: subprocess.Popen[bytes]) -> dict[str, str]:
    assert guard.stdout is not None  # it was asked for
    ready, _, _ = select.select([guard.stdout], [], [], ANSWER_S)
    line = guard.stdout.readline().decode(errors="replace").strip() if ready else "failed it did not answer"
    word, _, rest = line.partition(" ")
    if word == "ready":
        return mps_guard.environment(Path(rest))
    print(f"no MPS daemon ({rest}): processes take turns on the GPU, which is slow", file=sys.stderr)
    return {}
