"""How does one target get driven, step after step?

One loop per target: plan, send it to target and drafter at the same time, take the verdict, trim and hand out, plan
again; with `depth` above 1, plans leave before the verdicts of those before them. It is a state machine on the event
loop: everything happens in synchronous callbacks (an event came, a client came or left, a timer), so no two things are
ever half done at once and a step costs no task. It owns every request bound to its target, from submission to the end,
over losses of target and drafter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from gateway.bonds import Bonds
from gateway.checks import api_field
from gateway.clients import StreamLost, TargetStream
from gateway.commits import apply_verdict
from gateway.config import GatewayConfig
from gateway.errors import GatewayError, GenerationTimeout, InvalidGeneration, QueueFull, StepFailed, TargetUnavailable
from gateway.flights import Flights
from gateway.messages import (
    AdmitStatus,
    Admitted,
    BadEvent,
    Capacity,
    Fault,
    Released,
    RowStatus,
    StepResult,
    TargetEvent,
    TargetInfo,
)
from gateway.metrics import GatewayMetrics
from gateway.requests import ActiveRequest, Bond, Phase
from gateway.scheduler import Limits, Scheduler
from gateway.turned_away import TurnedAway

_log = logging.getLogger(__name__)

TICK_S = 0.05
RETRY_S = 0.02  # before a placement or a starved step is tried again where nothing else would bring it about
MAX_FAULTS = 3  # steps in a row that may fail under a request before it is given up


class TargetLoop:
    """Everything about one target and the requests bound to it."""

    def __init__(self, config: GatewayConfig, gateway_id: str, metrics: GatewayMetrics) -> None:
        self.address = config.target
        self.info: TargetInfo | None = None
        self.up = asyncio.Event()
        self.idle = asyncio.Event()  # no request here
        self.idle.set()
        self.lost_since = time.monotonic()
        self.detail = "not connected yet"
        self.scheduler = Scheduler()
        self._config = config
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._limits = Limits(1, 1, 0, 1, 1)
        self._capacity = Capacity(0, 0)
        self._stream: TargetStream | None = None
        self._greeted_by = 0.0
        self._flights = Flights()
        self._relieved = 0  # the last step sent before somebody gave way
        self._verdict_at: float | None = None  # of the step whose successor is not sent yet
        self._pause_until = 0.0
        self._turned_away = TurnedAway()
        self.bonds = Bonds(config, gateway_id, metrics, self.scheduler.placed, self._on_drafter_answer)

    # The task's side.

    async def run(self) -> None:
        """Keep the target connected and driven until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_connected())
            tasks.create_task(self._watch())
            if self.bonds.link is not None:
                tasks.create_task(self.bonds.link.run())

    async def _keep_connected(self) -> None:
        pause = self._config.reconnect_min_s
        while True:
            self._greeted_by = time.monotonic() + self._config.step_timeout_s
            self._stream = TargetStream(self.address, self._on_event, self._config.max_queued_commands)
            reason = await self._stream.converse(self._gateway_id)
            was_up = self.up.is_set()
            self._on_target_lost(reason)
            pause = self._config.reconnect_min_s if was_up else min(2 * pause, self._config.reconnect_max_s)
            await asyncio.sleep(pause)

    async def _watch(self) -> None:
        """Enforce the deadlines that no event brings about."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for request in [r for r in self.scheduler.waiting if not r.started]:
                if now - request.submitted_at > self._config.queue_timeout_s:
                    self._fail(request, GenerationTimeout("The request was not started in time; try again later."))
            if not self.up.is_set():
                if now - self.lost_since > self._config.target_wait_s:
                    for request in list(self.scheduler.waiting):
                        self._fail(request, TargetUnavailable("The model is not available; try again later."))
                if now > self._greeted_by and self._stream is not None:
                    self._stream.close("no answer to hello")
            elif self._stream is not None and self._overdue(now):
                self._stream.close(f"no answer within {self._config.step_timeout_s:g} s")
            else:
                self._advance()  # pauses that are over, and room that other gateways have made, come without an event

    def _overdue(self, now: float) -> bool:
        since = now - self._config.step_timeout_s
        if self._flights:  # admissions wait behind the steps
            return self._flights.overdue(since)
        return any(request.unanswered_since(since) for request in self.scheduler.placed.values())

    # The dispatcher's side.

    def submit(self, request: ActiveRequest) -> None:
        """Take on a request that has been checked. Raises QueueFull when it would wait behind too many."""
        self.scheduler.enqueue(request)
        self._advance()
        if request.phase is Phase.WAITING and len(self.scheduler.waiting) > self._config.max_waiting:
            self._end(request, QueueFull.__name__)
            placed, waiting = len(self.scheduler.placed), len(self.scheduler.waiting)
            raise QueueFull(self._turned_away.come_back_s(placed, waiting, time.monotonic()))
        self._gauge()

    def cancel(self, request: ActiveRequest) -> None:
        """Its client is gone: give everything back now; what is under way for it is dropped when it comes."""
        if request.phase is not Phase.ENDED:
            self._end(request, "cancelled")
            self._advance()

    def fail_all(self, error: GatewayError) -> None:
        """End every request with `error`."""
        for request in [*self.scheduler.waiting, *self.scheduler.placed.values()]:
            self._fail(request, error)

    # Events of the target.

    def _on_event(self, event: TargetEvent) -> None:
        match event:
            case StepResult():
                self._on_result(event)
            case Admitted():
                self._capacity = event.capacity
                self._on_target_admitted(event)
            case Released():
                self._capacity = event.capacity
            case TargetInfo():
                self._on_info(event)
            case Fault():
                self._on_fault(event)
        self._advance()

    def _on_info(self, info: TargetInfo) -> None:
        self.info = info
        self._limits = Limits.of(info, self._config.max_step_tokens, self._config.max_running)
        self._capacity = Capacity(info.num_seats, info.num_blocks)
        self._pause_until = 0.0
        self.detail = ""
        self.up.set()
        self._metrics.target_up.set(1)
        _log.info("target %s at %s: %s", info.instance_id, self.address, info.model)
        for request in list(self.scheduler.waiting):
            if request.max_total_len > info.max_request_len:  # another model came back under the same address
                self._fail(request, StepFailed("The model was replaced by one that cannot hold this request."))
        if self.bonds.link is not None:
            self.bonds.link.target_up(info.instance_id)

    def _on_target_lost(self, reason: str) -> None:
        if self.up.is_set():
            self.up.clear()
            self.lost_since = time.monotonic()
            self._metrics.target_up.set(0)
            _log.warning("lost the target at %s: %s", self.address, reason)
        elif reason != self.detail:
            _log.info("no target at %s: %s", self.address, reason)
        self.detail = reason
        self._stream = None
        if self.bonds.link is not None:
            self.bonds.link.target_down()
        for request in {row.request for row in self._flights.lost()}:
            request.faults += 1  # whatever ends the target whenever it is run must not do so for ever
        for request in list(self.scheduler.placed.values()):
            if request.faults >= MAX_FAULTS:
                self._fail(request, StepFailed("The model was lost each time it ran this request."))
            else:
                self._metrics.resumptions.inc()
                self._send_back(request)
        self._gauge()

    def _on_target_admitted(self, event: Admitted) -> None:
        request = self.scheduler.placed.get(event.request_id)
        if request is None or request.epoch != event.epoch or request.phase is not Phase.PLACING:
            return
        match event.status:
            case AdmitStatus.OK:
                if event.cached_len >= request.placed_len:
                    raise BadEvent(f"cached_len {event.cached_len} of {request.placed_len} tokens")
                request.target_answered = True
                request.cached_len = min(request.cached_len, event.cached_len)
                self._start(request)
                if request.phase is Phase.PLACING:  # from here on it is the drafter alone that it waits for
                    asyncio.get_running_loop().call_later(
                        self._config.step_deadline_ms / 1e3, self._start_without_drafter, request, request.epoch
                    )
            case AdmitStatus.NO_SEAT:  # another gateway has it
                self._send_back(request)
                self._pause()
            case AdmitStatus.INVALID:
                self._fail(request, InvalidGeneration(api_field(event.field, request.generation), event.detail))

    def _on_fault(self, fault: Fault) -> None:
        _log.error("target %s: %s: %s", self.address, fault.kind, fault.detail)
        flight = self._flights.failed(fault.seq, time.monotonic())
        if flight is not None:
            for row in flight.rows:
                if row.is_current:
                    self._suffer(row.request, fault.detail)
            self.bonds.step_failed(flight.plan)
        elif fault.request_id:
            request = self.scheduler.placed.get(fault.request_id)
            if request is not None:
                self._suffer(request, fault.detail)

    def _on_result(self, result: StepResult) -> None:
        flight = self._flights.answered_by(result)
        self._capacity = result.capacity
        self._verdict_at = now = time.monotonic()
        self._metrics.observe_step(result, len(flight.rows), now - flight.sent_at)
        starved: list[ActiveRequest] = []
        ran = False
        for row, verdict in zip(flight.rows, result.verdicts, strict=True):
            request = row.request
            if not row.is_current:
                continue  # it ended or lost its placement meanwhile: surplus
            if verdict.status is RowStatus.UNKNOWN:
                self._suffer(request, "the target does not know the request")
            elif verdict.status is not RowStatus.OK:
                request.stalled = True  # its rows under way follow on one that did not run
                self.bonds.no_drafts(request, flight.plan)
                if verdict.status is RowStatus.STARVED:
                    starved.append(request)
            else:
                ran = True
                delta = apply_verdict(request, row.plan, verdict, self._metrics, now)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    self._end(request, delta.finish_reason)
                stream = request.stream()
                if stream is not None:
                    stream.put(delta)
        self._flights.landed(now)  # only now: a verdict that makes no sense is a fault of the rows that were under way
        if starved and flight.number > self._relieved:  # else the target had not yet heard of who gave way
            self._relieve(starved, ran, now)
        # Last: a miss closes the channel, and what waited for the drafter then goes on at once.
        self.bonds.step_done(flight.plan, result.drafts_missed)

    def _relieve(self, starved: list[ActiveRequest], ran: bool, now: float) -> None:
        """Blocks have run out under `starved`."""
        victim = self.scheduler.give_way(starved)
        if victim is not None:
            self._metrics.preemptions.inc()
            self._relieved = self._flights.num_sent
            self._send_back(victim)
        elif not ran:
            # Nobody here can give way (the blocks are another gateway's): wait for some to come free, but not for ever.
            self._pause()
            for request in starved:
                if request.starved_since is None:
                    request.starved_since = now
                elif now - request.starved_since > self._config.queue_timeout_s:
                    self._fail(request, StepFailed("The model has no memory left for this request; try again later."))

    def _suffer(self, request: ActiveRequest, detail: str) -> None:
        """A step failed under it: place it anew, unless that has not helped."""
        request.faults += 1
        if request.faults >= MAX_FAULTS:
            self._fail(request, StepFailed(f"The model could not run this request: {detail}"))
        else:
            self._send_back(request)

    # Events of the drafter.

    def _on_drafter_answer(self) -> None:
        for request in [r for r in self.scheduler.placed.values() if r.phase is Phase.PLACING]:
            self._start(request)
        self._advance()

    # Moving requests.

    def _place(self, request: ActiveRequest, stream: TargetStream, now: float) -> None:
        self.scheduler.place(request)
        request.to_be_placed(now)
        stream.admit(request.placement("", mid_stream=False))
        self.bonds.ask(request, mid_stream=False)

    def _start_without_drafter(self, request: ActiveRequest, epoch: int) -> None:
        if request.phase is Phase.PLACING and request.epoch == epoch and request.bond is Bond.ASKED:
            self.bonds.give_up_waiting(request)
            self._start(request)
            self._advance()

    def _start(self, request: ActiveRequest) -> None:
        """It runs as soon as every service that was asked has answered."""
        if request.phase is not Phase.PLACING or not request.target_answered or request.bond is Bond.ASKED:
            return
        request.phase = Phase.RUNNING
        request.context_len = request.cached_len
        if not request.started:
            request.started_at = request.placed_at
            request.first_cached_len = request.cached_len
            self._metrics.count_start(request.placed_at - request.submitted_at, request.prompt_len, request.cached_len)

    def _send_back(self, request: ActiveRequest) -> None:
        """It loses its placement, keeps its tokens and waits at its place in the order of ages."""
        self._release(request)
        self.scheduler.send_back(request)

    def _release(self, request: ActiveRequest) -> None:
        self.bonds.release(request)
        if self._stream is not None:
            with contextlib.suppress(StreamLost):  # then the target drops everything with the stream
                self._stream.release(request.request_id, request.epoch)

    def _end(self, request: ActiveRequest, outcome: str) -> None:
        if request.phase in (Phase.PLACING, Phase.RUNNING):
            self._release(request)
        self.scheduler.end(request)
        self._metrics.count_end(outcome)
        now = time.monotonic()
        if request.started_at is not None:
            self._turned_away.ended(now - request.started_at)
        if outcome in ("stop", "length"):
            self._metrics.request_latency.observe(now - request.submitted_at)
        self._gauge()

    def _fail(self, request: ActiveRequest, error: GatewayError) -> None:
        self._end(request, type(error).__name__)
        stream = request.stream()
        if stream is not None:
            stream.fail(error)

    def _pause(self) -> None:
        self._pause_until = time.monotonic() + RETRY_S
        asyncio.get_running_loop().call_later(RETRY_S * 1.05, self._advance)

    # Planning.

    def _advance(self) -> None:
        """Let in who fits, and send steps until enough are under way. Safe to call at any time."""
        stream = self._stream
        now = time.monotonic()
        if stream is None or not self.up.is_set() or now < self._pause_until:
            return
        try:
            while (request := self.scheduler.next_admission(self._limits, self._capacity)) is not None:
                self._place(request, stream, now)
            # A step of a suspect is alone, also in time: then it is known who ended the target.
            depth = 1 if any(request.faults for request in self.scheduler.placed.values()) else self._config.depth
            while len(self._flights) < depth and self._send_plan(stream, now):
                pass
        except StreamLost:
            return  # `run` puts everything back when the stream has ended
        finally:
            self._gauge()

    def _send_plan(self, stream: TargetStream, now: float) -> bool:
        """Send the next step. False: nothing can run."""
        self.bonds.ask_anew(now)
        drafting = self.bonds.drafting()
        rows = self.scheduler.plan_rows(self._limits, drafting)
        verdict_at, self._verdict_at = self._verdict_at, None
        if not rows:
            return False
        plan = self.bonds.step_of(rows, drafting)
        stream.plan(plan)
        self._flights.sent(plan, rows, now)
        self.bonds.step_sent(plan, rows)
        if verdict_at is not None:
            self._metrics.gateway_total.observe(time.monotonic() - verdict_at)
        return True

    # Measuring.

    def _gauge(self) -> None:
        if self.scheduler.waiting or self.scheduler.placed:
            self.idle.clear()
        else:
            self.idle.set()
        self._metrics.set_load(len(self.scheduler.waiting), len(self.scheduler.placed))
        # What a lost target held is gone with it.
        self._metrics.set_capacity(self._capacity if self.up.is_set() else None, self._limits.usable_blocks)
