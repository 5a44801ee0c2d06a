"""How do a benchmark's processes share one GPU?

Under a Multi-Process Service daemon of its own, whose pipe and log folders belong to the run, so that kernels of
several processes need no context switch between them and nobody else's daemon is touched. No setting of the device is
changed. Without the daemon's program everything works, an order of magnitude slower from one process to the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CONTROL = "nvidia-cuda-mps-control"
ANSWER_S = 20.0


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without initialising CUDA: a process joins a daemon at that moment, or never."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


@contextmanager
def shared_gpu(device: torch.device, directory: Path) -> Iterator[dict[str, str]]:
    """Inside, this process (if it has not used CUDA yet) and its children share the GPU through a daemon.

    Yields the environment that says so, which is in ours too meanwhile: empty on a CPU and where no daemon started.
    """
    env = _start(directory) if device.type == "cuda" else {}
    before = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    try:
        yield env
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
        if env:
            _control(env, "quit")


def _start(directory: Path) -> dict[str, str]:
    env = {}
    for key, name in (("CUDA_MPS_PIPE_DIRECTORY", "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log")):
        (directory / name).mkdir(parents=True, exist_ok=True)
        env[key] = str(directory / name)
    try:
        subprocess.run([CONTROL, "-d"], env={**os.environ, **env}, check=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS daemon ({error}): processes take turns on the GPU, which is slow", file=sys.stderr)
        return {}
    return env


def _control(env: dict[str, str], command: str) -> None:
    try:
        subprocess.run(
            [CONTROL], input=f"{command}\n", text=True, env={**os.environ, **env}, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the MPS daemon did not answer: {error}", file=sys.stderr)
