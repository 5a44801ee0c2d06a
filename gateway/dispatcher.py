"""Where does a generation go, and is it let in?

The one door for every public face: checks a generation, binds it to a target for good, and hands back the stream of
its deltas. Owns the target loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gateway.checks import check_generation
from gateway.config import GatewayConfig
from gateway.errors import InvalidGeneration, QueueFull, ShuttingDown, TargetUnavailable
from gateway.generation import Generation
from gateway.messages import TargetInfo
from gateway.metrics import GatewayMetrics
from gateway.requests import ActiveRequest, DeltaStream
from gateway.target_loop import TargetLoop
from gateway.trimming import TokenText, Trimmer


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service as seen from here. role: target or drafter; state: serving, connecting or lost."""

    address: str
    role: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The whole gateway. ready: a request sent now would be served without waiting for a target."""

    services: tuple[ServiceStatus, ...]
    running: int
    waiting: int
    ready: bool


class Dispatcher:
    """`async with` it to have the targets connected and driven; `submit` generations meanwhile.

    make_text: the incremental text of one generation.
    """

    def __init__(
        self, config: GatewayConfig, make_text: Callable[[Generation], TokenText], metrics: GatewayMetrics
    ) -> None:
        self._config = config
        self._make_text = make_text
        self._metrics = metrics
        self._loops = [TargetLoop(config, uuid.uuid4().hex, metrics)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._arrivals = 0
        self._at_the_door = 0  # submitted before any target was ever there to check them against

    async def __aenter__(self) -> Dispatcher:
        self._tasks = [asyncio.create_task(loop.run()) for loop in self._loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, let what is there go on for `drain_s`, end the rest with ShuttingDown, and disconnect."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                for loop in self._loops:  # one that has become idle stays so: nothing new comes in
                    await loop.idle.wait()
        for loop in self._loops:
            loop.fail_all(ShuttingDown("The gateway is stopping."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def run_until_failure(self) -> None:
        """Wait for as long as the loops are well; raises what ended one of them: a fault of the gateway's own."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def submit(self, generation: Generation) -> DeltaStream:
        """Start a generation; iterate what comes back for its deltas.

        Raises InvalidGeneration, QueueFull, TargetUnavailable or ShuttingDown; iterating raises those and
        GenerationTimeout and StepFailed. Leaving the stream before its end frees the request's seats and blocks within
        one step.
        """
        if self._stopping:
            raise ShuttingDown("The gateway is stopping.")
        loop = min(self._loops, key=lambda loop: len(loop.scheduler.waiting) + len(loop.scheduler.placed))
        info = await self._info_of(loop)
        if self._stopping:
            raise ShuttingDown("The gateway is stopping.")
        max_tokens = check_generation(generation, info, self._config.max_draft_len)
        if loop.scheduler.holds(generation.request_id):
            raise InvalidGeneration("request_id", "is in use by a request that has not ended")
        seed = generation.sampling.seed
        self._arrivals += 1
        request = ActiveRequest(
            generation,
            self._arrivals,
            secrets.randbits(63) if seed is None else seed % 2**64,
            self._config.draft_len if generation.draft_len is None else generation.draft_len,
            max_tokens,
            Trimmer(
                self._make_text(generation),
                generation.stop_token_ids,
                frozenset() if generation.ignore_eos else info.eos_token_ids,
                max_tokens,
            ),
            time.monotonic(),
        )
        stream = DeltaStream(generation.request_id, partial(loop.cancel, request))
        request.stream = weakref.ref(stream)
        try:
            loop.submit(request)
        except QueueFull:
            stream.disown()
            raise
        return stream

    async def _info_of(self, loop: TargetLoop) -> TargetInfo:
        """Who the target is, or was: a request may wait for it to come back, but not for ever."""
        left = loop.lost_since + self._config.target_wait_s - time.monotonic()
        if loop.up.is_set() or (loop.info is not None and left > 0):
            assert loop.info is not None  # it was told with `up`
            return loop.info
        if left <= 0:
            raise TargetUnavailable("The model is not available; try again later.")
        if self._at_the_door >= self._config.max_waiting:
            raise QueueFull(1.0)
        self._at_the_door += 1
        try:
            async with asyncio.timeout(left):
                await loop.up.wait()
        except TimeoutError:
            raise TargetUnavailable("The model is not available; try again later.") from None
        finally:
            self._at_the_door -= 1
        assert loop.info is not None  # it was told with `up`
        return loop.info

    def status(self) -> GatewayStatus:
        """How everything is right now."""
        services: list[ServiceStatus] = []
        for loop in self._loops:
            up = loop.up.is_set()
            state = "serving" if up else "connecting" if loop.info is None else "lost"
            services.append(ServiceStatus(loop.address, "target", state, loop.detail))
            link = loop.bonds.link
            if link is not None:
                state = "serving" if link.keeps_up else "lost" if link.was_ready else "connecting"
                services.append(ServiceStatus(link.address, "drafter", state, link.detail))
        return GatewayStatus(
            tuple(services),
            sum(len(loop.scheduler.placed) for loop in self._loops),
            sum(len(loop.scheduler.waiting) for loop in self._loops),
            any(loop.up.is_set() for loop in self._loops) and not self._stopping,
        )
