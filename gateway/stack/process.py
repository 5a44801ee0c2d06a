"""How is one service process started, listened to and ended?

A process runs in a session of its own, so a Ctrl-C in the terminal reaches the supervisor alone, and everything the
process started can be ended with it. Both its streams come back line by line; lines have a bound, so a process that
writes without line ends costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.stack.settings import ServiceSpec

MAX_LINE = 16 * 1024
KILL_WAIT_S = 10.0
LAST_WORDS_S = 2.0


class ServiceProcess:
    """A running process of a service. on_line: called with each line it prints, without line end."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._reader = asyncio.create_task(_read_lines(process.stdout, on_line))

    @classmethod
    async def start(cls, spec: ServiceSpec, on_line: Callable[[str], None]) -> ServiceProcess:
        """Start it, on a leash. Raises OSError when it cannot be run at all."""
        process = await asyncio.create_subprocess_exec(
            *leashed(spec.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **spec.env},
            start_new_session=True,
        )
        return cls(process, on_line)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status (negative: the signal), after its last line was handed over. What it left behind is ended."""
        status = await self._process.wait()
        self._signal(signal.SIGKILL)
        # Whoever waits here may be cancelled; the reader is not its to cancel. A process that left the group may hold
        # the pipe open for ever.
        await asyncio.wait({self._reader}, timeout=LAST_WORDS_S)
        self._reader.cancel()
        return status

    async def stop(self, deadline_s: float) -> None:
        """SIGTERM; SIGKILL to the whole group `deadline_s` later. Returns when it is gone."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_WAIT_S):
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def leashed(argv: Sequence[str]) -> list[str]:
    """`argv` tied to this process (see `leash`). Start it from the main thread: the kernel's tie is to a thread."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("leash.py")), str(os.getpid()), *argv]


async def _read_lines(stream: asyncio.StreamReader | None, on_line: Callable[[str], None]) -> None:
    assert stream is not None  # it was asked for
    pending = b""
    while data := await stream.read(MAX_LINE):
        *lines, pending = (pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(pending) >= MAX_LINE:
            lines.append(pending)
            pending = b""
        for line in lines:
            on_line(line.decode("utf-8", "replace"))
    if pending:
        on_line(pending.decode("utf-8", "replace"))
