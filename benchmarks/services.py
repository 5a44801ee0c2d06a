"""How does a benchmark run a target and a drafter as the processes they are, on their own or on one GPU under MPS?

`Services` writes one config file, starts both at once (loading and compiling side by side), waits for their ready lines
and ends them. What they print goes to files beside the config.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from gateway.stack.settings import free_ports

ROOT = Path(__file__).resolve().parent.parent
READY_S = 180.0
STOP_S = 20.0
WRAPPED_STOP_S = 60.0
POLL_S = 0.05
LOG_TAIL = 4000


class ServicesFailed(Exception):
    """A service did not come up, or died; with the end of its log."""


class Services:
    """`with` it: target and drafter run. `drafter=None`: the target alone. env: added to both processes' own.

    wrappers: by service, a command that it runs under, such as compute-sanitizer with its options; it may take long to
    end.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        target: Mapping[str, Any],
        drafter: Mapping[str, Any] | None,
        env: Mapping[str, str] | None = None,
        wrappers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._wrappers = dict(wrappers or {})
        ports = free_ports(2)
        self.target_address = f"127.0.0.1:{ports[0]}"
        self.drafter_address = f"127.0.0.1:{ports[1]}" if drafter is not None else None
        sections: dict[str, Any] = {"model": model, "target": {**target, "listen": self.target_address}}
        if drafter is not None:
            sections["drafter"] = {**drafter, "listen": self.drafter_address}
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._config = directory / "services.yaml"
        self._config.write_text(yaml.safe_dump(sections, sort_keys=False))
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        paths = [str(ROOT), self._env.get("PYTHONPATH", "")]
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Services:
        for name in self.names:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # what went wrong may be told there
            for name in self.names:
                print(f"--- {name}\n{self.log(name)}", file=sys.stderr)
        for name, process in self._processes.items():
            self._ask_to_stop(process, name in self._wrappers)
        for name, process in self._processes.items():
            try:
                process.wait(WRAPPED_STOP_S if name in self._wrappers else STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _ask_to_stop(self, process: subprocess.Popen[bytes], is_wrapped: bool) -> None:
        """SIGTERM to the service itself: a wrapper has a word to say after it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            wrapped = psutil.Process(process.pid).children(recursive=True) if is_wrapped else []
            for service in wrapped or [process]:
                service.terminate()

    @property
    def names(self) -> tuple[str, ...]:
        """The services that run."""
        return ("target",) if self.drafter_address is None else ("target", "drafter")

    def start(self, name: str) -> None:
        """Start a service, or start it again."""
        argv = [*self._wrappers.get(name, ()), sys.executable, "-m", f"{name}_service", "--config", str(self._config)]
        with self._log_path(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                argv, cwd=ROOT, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self, name: str) -> None:
        """kill -9, and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait(10)

    def wait_ready(self) -> None:
        """Until both said that they are ready. ServicesFailed: one died, or the deadline passed."""
        end = time.monotonic() + READY_S
        for name in self.names:
            while f"{name} ready" not in self._log_path(name).read_text(errors="replace"):
                status = self._processes[name].poll()
                if status is not None or time.monotonic() > end:
                    raise ServicesFailed(f"{name} is not ready (exit status {status}):\n{self.log(name)}")
                time.sleep(POLL_S)  # between two looks at another process's output

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time that each process has used so far, user and system."""
        times = {}
        for name, process in self._processes.items():
            used = psutil.Process(process.pid).cpu_times()
            times[name] = float(used.user + used.system)
        return times

    def log(self, name: str, length: int = LOG_TAIL) -> str:
        """The end of what it printed."""
        return self._log_path(name).read_text(errors="replace")[-length:]

    def _log_path(self, name: str) -> Path:
        return self._directory / f"{name}.log"
