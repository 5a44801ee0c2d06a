"""When do target and drafter share one GPU, and how do they run on it at the same time?

Two processes on one GPU take turns, unless NVIDIA's Multi-Process Service makes them clients of one context. So the
stack has a daemon of its own where its config puts both services on one GPU (see `mps_guard`, the process that holds
it). Without one everything works, and costs what NO_MPS says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.errors import ConfigError
from gateway.stack.mps_guard import QUIT_S, START_S, environment
from gateway.stack.settings import StackSettings

NO_MPS = (
    "target and drafter take turns on the GPU: a hop between them with its data takes some 150 us instead of 13, "
    "nothing overlaps"
)
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
PATIENCE_S = 5.0


def shares_gpu(settings: StackSettings) -> bool:
    """Whether the config puts the drafter and a rank of the target on one GPU and lets them share it (`gateway.mps`,
    `auto` or `off`).
    """
    choice = _value(settings, "gateway", "mps", "auto")
    # YAML reads a bare `off` as false.
    if choice not in ("auto", "off", False):
        raise ConfigError("gateway.mps", f"must be auto or off, got {choice!r}")
    first, drafter = (_gpu(_value(settings, name, "device", "cpu")) for name in ("target", "drafter"))
    if choice != "auto" or settings.drafter is None or first is None or drafter is None:
        return False
    num_ranks = _value(settings, "target", "pcp_size", "1")  # rank r runs on the r-th GPU from the first
    return first <= drafter < first + (int(str(num_ranks)) if str(num_ranks).isdecimal() else 1)


@asynccontextmanager
async def shared_gpu(
    settings: StackSettings, say: Callable[[str], None], base: Mapping[str, str] = os.environ
) -> AsyncIterator[dict[str, str]]:
    """Inside, the services may run on one GPU at once; yields what their environment needs for it, often nothing.

    A daemon that the user has chosen (CUDA_MPS_PIPE_DIRECTORY) is left to be used. say: called with one line when there
    is none and it will cost.
    """
    if not shares_gpu(settings) or PIPE_DIRECTORY in base:
        yield {}
        return
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(__file__).with_name("mps_guard.py"))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(base),
        start_new_session=True,
    )
    try:
        directory, reason = await _answer(guard)
        if directory is None:
            say(f"No MPS ({reason}): {NO_MPS}")
        yield {} if directory is None else environment(directory)
    finally:
        await _end(guard)


async def _answer(guard: asyncio.subprocess.Process) -> tuple[Path | None, str]:
    """The daemon's folder, or why there is no daemon."""
    assert guard.stdout is not None  # it was asked for
    try:
        async with asyncio.timeout(2 * START_S + PATIENCE_S):
            word, _, rest = (await guard.stdout.readline()).decode(errors="replace").strip().partition(" ")
    except TimeoutError:
        return None, "its daemon did not start in time"
    return (Path(rest), "") if word == "ready" else (None, rest or "its guard ended")


async def _end(guard: asyncio.subprocess.Process) -> None:
    """Close the guard's input, which ends daemon and guard; SIGKILL when it takes too long."""
    assert guard.stdin is not None  # it was asked for
    guard.stdin.close()
    try:
        async with asyncio.timeout(QUIT_S + PATIENCE_S):
            await guard.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            guard.kill()
        await guard.wait()


def _value(settings: StackSettings, section: str, key: str, default: str) -> object:
    return (settings.content.get(section) or {}).get(key, default)


def _gpu(device: object) -> int | None:
    """The number of the GPU that a `device` setting names; None for a CPU, and for what the service will refuse."""
    name, _, index = str(device).partition(":")
    if name != "cuda":
        return None
    return int(index) if index.isdecimal() else 0
