"""How does a test start real processes, wait for what they print, and leave none behind?

Each runs in a session of its own, so that the whole group can be ended; its output (both streams) is read by a thread,
kept, and written to a log file in the test's folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
STOP_GRACE_S = 5.0


class TestProcess:
    """A running process and everything it has printed."""

    __test__ = False  # not a test class, whatever its name

    def __init__(self, argv: Sequence[str], log_path: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.log_path = log_path
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self.popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id, which is also its process group's."""
        return self.popen.pid

    @property
    def output(self) -> str:
        """All it has printed so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for_line(self, pattern: str, deadline_s: float = 30.0) -> re.Match[str]:
        """The first line with `pattern` in it; AssertionError with the output when the end or the deadline is first."""
        compiled = re.compile(pattern)
        end = time.monotonic() + deadline_s
        seen = 0
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if match := compiled.search(line):
                        return match
                seen = len(self._lines)
                left = end - time.monotonic()
                if self._ended or left <= 0:
                    why = "the process ended" if self._ended else f"{deadline_s} s passed"
                    raise AssertionError(f"no line matches {pattern!r}: {why}. Output:\n{''.join(self._lines)}")
                self._changed.wait(left)

    def wait(self, deadline_s: float = 30.0) -> int:
        """Wait for the end, and for all output; returns the exit status (negative: the signal)."""
        status = self.popen.wait(deadline_s)
        self._reader.join(deadline_s)
        return status

    def kill(self) -> None:
        """kill -9 of the process alone (its children live on until the test ends), and wait for its end."""
        self.popen.kill()
        self.popen.wait(STOP_GRACE_S)

    def terminate(self) -> None:
        """SIGTERM."""
        self.popen.terminate()

    def close(self) -> None:
        """End the whole group: SIGTERM, a moment's grace, SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                break
            try:
                self.popen.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
        self.popen.wait(STOP_GRACE_S)
        self._reader.join(STOP_GRACE_S)
        if self.popen.stdout is not None and not self._reader.is_alive():
            self.popen.stdout.close()

    def _read(self, stream: IO[str]) -> None:
        with self.log_path.open("w") as log:
            for line in stream:
                log.write(line)
                log.flush()
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class ProcessGroup:
    """The processes of one test."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._started: list[TestProcess] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> TestProcess:
        """Start `argv` in the repository root; `env` is added to the test's own environment."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        merged = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **(env or {})}
        process = TestProcess(argv, self._log_dir / f"process-{len(self._started)}.log", merged, cwd)
        self._started.append(process)
        return process

    def python(self, *arguments: str, env: Mapping[str, str] | None = None) -> TestProcess:
        """Start this interpreter with `arguments`, such as "-m", "target_service"."""
        return self.start([sys.executable, *arguments], env)

    def close(self) -> None:
        """End all of them."""
        for process in self._started:
            process.close()
