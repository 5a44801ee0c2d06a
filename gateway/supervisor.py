"""How do the services of one machine run as one thing: started, watched, restarted, stopped?

Every service is a process of its own. One that dies before it was ever ready ends the start, with its last words; one
that dies later is started again, after a pause that doubles while it keeps dying. Stopping goes from the gateway
inwards, with a deadline for each, a short one for who was never ready, and SIGKILL behind it. Should the supervisor
itself be killed, the kernel ends the services (see `stack.leash`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from gateway.stack.clients import HealthClient
from gateway.stack.process import ServiceProcess
from gateway.stack.settings import ServiceSpec

LAST_LINES = 30
BAD_START = 2  # a service's exit status when its config or model is no good; what is wrong with it is a line like:
COMPLAINT = re.compile(r"(?:target_service|drafter_service|gateway): (.+)")


class ServiceState(Enum):
    """What a service is doing, as far as its supervisor can see."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Seconds. start: until all services are ready. stop: for each to end by itself after SIGTERM; stop_unready: for
    one that was never ready, so has nothing to drain, and may be deaf while it loads a model.

    first_backoff, last_backoff: pause before a restart, doubling from one to the other while the service lives for
    less than `steady`. poll: between two looks at a service that is not ready; probe: for one answer to such a look.
    """

    start_s: float = 300.0
    stop_s: float = 10.0
    stop_unready_s: float = 1.0
    first_backoff_s: float = 0.5
    last_backoff_s: float = 15.0
    steady_s: float = 30.0
    poll_s: float = 0.1
    probe_s: float = 2.0


class StartFailed(Exception):
    """A service could not be brought up. `last_lines` is what it printed at the end."""

    def __init__(self, name: str, detail: str, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail
        self.last_lines = tuple(last_lines)


@dataclass(slots=True)
class _Service:
    spec: ServiceSpec
    state: ServiceState = ServiceState.STARTING
    process: ServiceProcess | None = None
    was_ready: bool = False
    num_restarts: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


class Supervisor:
    """`async with` it: inside, the services run. Owns their processes.

    on_line(name, line): everything they print. on_state(name, state, detail): every change of state.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        on_line: Callable[[str, str], None],
        on_state: Callable[[str, ServiceState, str], None],
        limits: SupervisorLimits | None = None,
    ) -> None:
        self._services = [_Service(spec) for spec in specs]
        self._on_line = on_line
        self._on_state = on_state
        self._limits = limits or SupervisorLimits()
        self._stopping = False
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failure: StartFailed | None = None

    async def __aenter__(self) -> Supervisor:
        self._keepers = [asyncio.create_task(self._keep(service)) for service in self._services]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def pid(self, name: str) -> int | None:
        """The process id of a service, None while it has no process."""
        service = next(service for service in self._services if service.spec.name == name)
        return None if service.process is None else service.process.pid

    async def wait_ready(self) -> None:
        """Wait until all services are ready. Raises StartFailed."""
        try:
            async with asyncio.timeout(self._limits.start_s):
                while not all(service.was_ready for service in self._services):
                    await self._wait_change()
        except TimeoutError:
            late = next(service for service in self._services if not service.was_ready)
            detail = f"not ready within {self._limits.start_s:.0f} s"
            raise StartFailed(late.spec.name, detail, late.last_lines) from None

    async def run(self) -> None:
        """Keep them running until the task is cancelled. Raises StartFailed when one cannot be brought up."""
        while True:
            await self._wait_change()

    async def stop(self) -> None:
        """Stop all, the gateway first: it drains what the other two still have to answer. Idempotent."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        *rest, first = self._services
        await self._stop_one(first)
        await asyncio.gather(*(self._stop_one(service) for service in rest))

    async def kill(self) -> None:
        """SIGKILL to all of them, now."""
        self._stopping = True
        await asyncio.gather(
            *(service.process.kill() for service in self._services if service.process is not None),
            return_exceptions=True,
        )

    async def _stop_one(self, service: _Service) -> None:
        process = service.process
        if process is not None:
            await process.stop(self._limits.stop_s if service.was_ready else self._limits.stop_unready_s)
            await process.wait()
            service.process = None
            self._set(service, ServiceState.STOPPED, "")

    async def _wait_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def _set(self, service: _Service, state: ServiceState, detail: str) -> None:
        service.state = state
        self._on_state(service.spec.name, state, detail)
        self._changed.set()

    def _fail(self, service: _Service, detail: str) -> None:
        self._failure = self._failure or StartFailed(service.spec.name, detail, service.last_lines)
        self._changed.set()

    async def _keep(self, service: _Service) -> None:
        """Run one service for as long as the supervisor runs."""
        backoff = self._limits.first_backoff_s

        def on_line(line: str) -> None:
            service.last_lines.append(line)
            self._on_line(service.spec.name, line)

        while True:
            started = time.monotonic()
            self._set(service, ServiceState.STARTING, "")
            try:
                service.process = await ServiceProcess.start(service.spec, on_line)
            except OSError as error:
                self._fail(service, f"cannot be started: {error.strerror}")
                return
            watcher = asyncio.create_task(self._watch_ready(service))
            try:
                status = await service.process.wait()
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            service.process = None
            if not service.was_ready:
                self._fail(service, _why_not_started(status, service.last_lines))
                return
            if time.monotonic() - started >= self._limits.steady_s:
                backoff = self._limits.first_backoff_s
            service.num_restarts += 1
            self._set(service, ServiceState.RESTARTING, f"{_status_text(status)}; again in {backoff:.1f} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, self._limits.last_backoff_s)

    async def _watch_ready(self, service: _Service) -> None:
        async with HealthClient(service.spec.grpc) as health:
            # Another process's readiness has no signal to wait for; it is asked until it says yes.
            while not await health.serving(self._limits.probe_s):  # noqa: ASYNC110
                await asyncio.sleep(self._limits.poll_s)
        service.was_ready = True
        self._set(service, ServiceState.READY, "")


def _why_not_started(status: int, last_lines: Sequence[str]) -> str:
    if status == BAD_START:
        for line in reversed(last_lines):
            if complaint := COMPLAINT.fullmatch(line):
                return f"cannot start: {complaint[1]}"
    return f"ended before it was ready ({_status_text(status)})"


def _status_text(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
