"""How does a test get a whole running stack: target, drafter and gateway as three real processes?

`Stack` writes one config file, starts the services as users start them, waits until the gateway says that it serves,
and ends them all. A service can be killed and started again on the same port.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.ports import ReservedPort

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 120.0
POLL_S = 0.05


@dataclass
class Stack:
    """Three processes and the addresses they listen on. Owns the processes: leave the context and they are gone."""

    config_path: Path
    log_dir: Path
    rest: str
    grpc: str
    target_address: str
    drafter_address: str | None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _log_start: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        module = {"target": "target_service", "drafter": "drafter_service", "gateway": "gateway"}[name]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log_path(name), "ab") as log:
            self._log_start[name] = log.tell()
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(self.config_path)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """The process stands still, as if its machine were busy elsewhere."""
        self.processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[name].send_signal(signal.SIGCONT)

    def wait_ready_line(self, name: str) -> None:
        """Until the process that was started last says that it is ready."""
        started = self._log_start[name]
        self.wait_until(f"{name} ready", lambda: f"{name} ready" in self.log_path(name).read_text()[started:])

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def stop(self, name: str, deadline_s: float = 15.0) -> int:
        process = self.processes[name]
        process.terminate()
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise AssertionError(f"{name} did not end on SIGTERM:\n{self.log(name)}") from None

    def log(self, name: str) -> str:
        return self.log_path(name).read_text(errors="replace")[-6000:]

    def wait_until(self, what: str, holds: Callable[[], bool], deadline_s: float = READY_DEADLINE_S) -> None:
        """Poll `holds()` until it is true; a dead process or the deadline fails with the logs."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and all(process.poll() is None for process in self.processes.values()):
            with contextlib.suppress(httpx.HTTPError):
                if holds():
                    return
            time.sleep(POLL_S)  # between two polls of another process, not in place of a signal of ours
        logs = "\n".join(f"--- {name} ({process.poll()})\n{self.log(name)}" for name, process in self.processes.items())
        raise AssertionError(f"not within {deadline_s} s: {what}\n{logs}")

    def health(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.rest}/health", timeout=5)
        return {"status_code": answer.status_code, **answer.json()}

    def services(self) -> dict[str, dict[str, Any]]:
        """GetStatus' view of every service, by role."""
        import grpc

        from protos import gateway_pb2, gateway_pb2_grpc

        with grpc.insecure_channel(self.grpc) as channel:
            status = gateway_pb2_grpc.GatewayServiceStub(channel).GetStatus(gateway_pb2.GetStatusRequest(), timeout=5)
        return {service.role: {"state": service.state, "detail": service.detail} for service in status.services}

    def wait_serving(self, *roles: str) -> None:
        import grpc

        def serving() -> bool:
            try:
                services = self.services()
            except grpc.RpcError:
                return False
            return all(services.get(role, {}).get("state") == "serving" for role in roles)

        self.wait_until(f"{roles} serving", serving)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name with labels."""
        samples = {}
        for line in httpx.get(f"{self.rest}/metrics", timeout=5).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def complete(self, prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy unless told otherwise, and the decoded answer; a bad status fails."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        answer = httpx.post(f"{self.rest}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, (
            f"{answer.status_code} {answer.text}\n{self.log('gateway')}\n{self.log('target')}"
        )
        return dict(answer.json())

    def stream(self, prompt: Any, max_tokens: int, **fields: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
        with httpx.stream("POST", f"{self.rest}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])


@contextlib.contextmanager
def running_stack(
    directory: Path,
    model: Path,
    target: Mapping[str, Any] | None = None,
    drafter: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> Iterator[Stack]:
    """A stack serving `model` from `directory` (config and logs). `drafter=None`: no drafter at all."""
    ports = [ReservedPort() for _ in range(4)]  # held for as long as it runs: other tests run beside this one
    addresses = [port.address for port in ports]
    sections: dict[str, Any] = {
        "model": str(model),
        "target": {"listen": addresses[0], "dtype": "float32", "threads": 1, **(target or {})},
        "gateway": {
            "rest": addresses[2],
            "grpc": addresses[3],
            "target": addresses[0],
            "drafter": addresses[1] if drafter is not None else None,
            "model_name": "tiny",
            "reconnect_max_s": 0.1,  # a test waits for the gateway to find the others, whenever they are ready
            **(gateway or {}),
        },
    }
    if drafter is not None:
        sections["drafter"] = {"listen": addresses[1], "threads": 1, **drafter}
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / "stack.yaml"
    config_path.write_text(yaml.safe_dump(sections))
    stack = Stack(
        config_path,
        directory,
        f"http://{addresses[2]}",
        addresses[3],
        addresses[0],
        addresses[1] if drafter is not None else None,
    )
    names = ["target", "gateway"] + (["drafter"] if drafter is not None else [])
    try:
        for name in names:
            stack.start(name)
        stack.wait_serving("target", *(["drafter"] if drafter is not None else []))
        yield stack
    finally:
        for process in stack.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in stack.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for port in ports:
            port.close()
