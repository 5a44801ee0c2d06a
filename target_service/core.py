"""What does each command do?

The service without threads and without RPCs: commands in, one event out for each, in order; a step that is launched
and not done comes out as a `Flight`, which gets its event later. Only the device thread calls it, so that sessions,
blocks and tensors have one owner.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.errors import IntegrityError, InvalidRequest, OutriderError, ProtocolError, RanksLost
from target_service.channels import OpenChannel, TargetChannels
from target_service.checks import Limits, check_admission, check_step
from target_service.failures import raise_if_device_lost
from target_service.flights import Flight
from target_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Command,
    Event,
    FaultReply,
    Hello,
    ReleaseReply,
    ReleaseRequest,
    RowRequest,
    ServiceInfo,
    StepReply,
    StepRequest,
    Unreadable,
)
from target_service.sessions import Session, Sessions
from target_service.streams import GatewayStream

_log = logging.getLogger(__name__)

MAX_SEQ = (1 << 63) - 1  # channels keep it as int64


class Runner(Protocol):
    """Runs steps: `runner.StepRunner` with the host, `device.runner.DeviceRunner` without it.

    max_in_flight: steps that it can have under way.
    """

    @property
    def max_in_flight(self) -> int: ...

    def place(self, session: Session) -> None:
        """Set up the per-seat state of a request just admitted."""
        ...

    def launch(
        self,
        step: StepRequest,
        placements: Sequence[Session | None],
        channel: OpenChannel | None,
        deadline_s: float,
        settle: Callable[[], None],
    ) -> StepReply | Flight:
        """Run a checked step, or put it under way. placements: each row's session, None where it is not resident.
        settle: completes what is under way.
        """
        ...

    def complete(self, flight: Flight) -> StepReply:
        """What came of a step that is done. In the order of the launches."""
        ...

    def forget(self, flight: Flight) -> None:
        """The step is over, completed or not. Idempotent."""
        ...

    def idle(self, channels: Sequence[OpenChannel]) -> bool:
        """Do a piece of what is better done before a step needs it, over these channels. False: there is nothing."""
        ...


class TargetCore:
    """Carries out commands. Used by one thread."""

    def __init__(
        self,
        info: ServiceInfo,
        limits: Limits,
        sessions: Sessions,
        runner: Runner,
        channels: TargetChannels,
        max_wait_s: float,
        check_integrity: bool,
    ) -> None:
        self.sessions = sessions
        self.channels = channels
        self._info = info
        self._limits = limits
        self._runner = runner
        self._max_wait_s = max_wait_s
        self._check_integrity = check_integrity
        self._flights: deque[tuple[GatewayStream, Flight]] = deque()

    def handle(self, stream: GatewayStream, command: Command) -> Event | Flight:
        """Carry out one command. What goes wrong in it becomes a FaultReply, and the service lives on. A step that is
        under way when this returns gets its `reply` by `land`.

        Raises only where the accounts of seats and blocks themselves are broken, so that nothing can be let go any
        more, and DeviceLost and RanksLost, after which nothing can be run any more.
        """
        outcome = self._guarded(stream, command, lambda: self._dispatch(stream, command))
        return self._broken(command) or outcome

    def idle(self) -> bool:
        """Use a moment in which nothing is asked for and nothing is under way. False: there was no use for it."""
        return not self._flights and self._runner.idle(self.channels.in_use())

    @property
    def in_flight(self) -> int:
        """Steps under way."""
        return len(self._flights)

    def land(self, flight: Flight) -> None:
        """Complete the steps under way up to this one, which the device has done. Nothing happens when it is completed
        already.
        """
        while flight.reply is None and self._flights:
            self._land_oldest()

    def land_done(self) -> None:
        """Complete the steps under way that the device has done."""
        while self._flights and _is_done(self._flights[0][1]):
            self._land_oldest()

    def settle(self) -> None:
        """Wait for all steps under way and complete them."""
        while self._flights:
            self._land_oldest()

    def _land_oldest(self) -> None:
        stream, flight = self._flights[0]
        try:
            flight.landing.wait()
            reply = self._runner.complete(flight)
            flight.reply = self._broken(flight.step) or reply
        except Exception as error:  # as for a command: its own requests are let go, no others
            raise_if_device_lost(error)
            _log.exception("failed to complete step %d", flight.step.seq)
            self._abandon(stream, flight.step)
            flight.reply = _fault(flight.step, OutriderError.kind, f"{type(error).__name__}: {error}")
        finally:
            self._flights.popleft()
            self._runner.forget(flight)

    def _broken(self, command: Command) -> FaultReply | None:
        """What to say where the accounts are broken after a command, if that is to be checked."""
        if self._check_integrity:
            try:
                self.sessions.check_integrity()
            except IntegrityError as error:
                return _fault(command, error.kind, str(error))
        return None

    def end_stream(self, stream: GatewayStream) -> None:
        """The stream is over: its requests give back what they hold."""
        released = self.sessions.release_stream(stream.stream_id)
        if released:
            _log.info("stream %d ended: %d requests released", stream.stream_id, released)

    def _guarded(self, stream: GatewayStream, command: Command, act: Callable[[], Event | Flight]) -> Event | Flight:
        try:
            return act()
        except InvalidRequest as error:
            if isinstance(command, Admission):
                return AdmissionReply(
                    command.request_id,
                    command.epoch,
                    AdmissionStatus.INVALID,
                    self.sessions.capacity,
                    field=error.field,
                    detail=error.detail,
                )
            return _fault(command, error.kind, str(error))
        except RanksLost:
            raise
        except OutriderError as error:
            return _fault(command, error.kind, str(error))
        except Exception as error:  # a bug met by one command must not take every other gateway's requests with it
            raise_if_device_lost(error)
            _log.exception("failed to carry out %s", type(command).__name__)
            self._abandon(stream, command)
            return _fault(command, OutriderError.kind, f"{type(error).__name__}: {error}")

    def _dispatch(self, stream: GatewayStream, command: Command) -> Event | Flight:
        if isinstance(command, Unreadable):
            raise command.error
        if isinstance(command, ReleaseRequest):
            stream.withdrawn.discard((command.request_id, command.epoch))
        if isinstance(command, Hello):
            if stream.greeted:
                raise ProtocolError("hello: came already on this stream")
            stream.greeted = True
            return self._info
        if not stream.greeted:
            raise ProtocolError(f"hello: must come first on a stream, got {type(command).__name__}")
        if isinstance(command, Admission):
            return self._admit(stream, command)
        if isinstance(command, StepRequest):
            return self._step(stream, command)
        self.sessions.release(command.request_id, command.epoch, stream.stream_id)
        return ReleaseReply(command.request_id, command.epoch, self.sessions.capacity)

    def _admit(self, stream: GatewayStream, admission: Admission) -> AdmissionReply:
        check_admission(admission, self._limits)
        reply = self.sessions.admit(stream.stream_id, admission)
        if reply.status is AdmissionStatus.OK:
            session = self.sessions.find(admission.request_id, admission.epoch, stream.stream_id)
            if session is None:
                raise IntegrityError(f"request {admission.request_id} was admitted and is not resident")
            with self._letting_go(stream, admission):
                self._runner.place(session)
        return reply

    def _step(self, stream: GatewayStream, step: StepRequest) -> StepReply | Flight:
        _check_seq(stream, step)
        # A plan whose number is right is used up, even when the rest of it is wrong: the next one has the next number.
        stream.last_seq = step.seq
        stream.last_channel = (step.channel_id, step.channel_epoch)
        check_step(step, self._limits)
        while len(self._flights) >= self._runner.max_in_flight:
            self._land_oldest()
        sessions = [self._session_of(stream, row) for row in step.rows]
        if not step.ahead and any(session is not None and session.rows_ahead for session in sessions):
            self.settle()  # its lengths are exact, so ours have to be
            sessions = [self._session_of(stream, row) for row in step.rows]  # one that failed took its requests along
        for index, (row, session) in enumerate(zip(step.rows, sessions, strict=True)):
            if session is not None:
                self.sessions.check_row(f"rows[{index}]", row, session, planned_ahead=step.ahead > 0)
        channel = self.channels.find(step.channel_id, step.channel_epoch) if step.channel_id else None
        deadline_s = min(step.deadline_ms / 1e3, self._max_wait_s)
        with self._letting_go(stream, step):
            outcome = self._runner.launch(step, sessions, channel, deadline_s, self.settle)
        if isinstance(outcome, Flight):
            self._flights.append((stream, outcome))
        return outcome

    def _session_of(self, stream: GatewayStream, row: RowRequest) -> Session | None:
        if (row.request_id, row.epoch) in stream.withdrawn:
            return None  # its release waits behind this plan, which was sent ahead: nobody reads what it would give
        return self.sessions.find(row.request_id, row.epoch, stream.stream_id)

    @contextlib.contextmanager
    def _letting_go(self, stream: GatewayStream, command: Command) -> Iterator[None]:
        """An error of ours in here comes when something may have moved on already. `_guarded` sees to all others."""
        try:
            yield
        except OutriderError:
            self._abandon(stream, command)
            raise

    def _abandon(self, stream: GatewayStream, command: Command) -> None:
        """After a bug in the middle of a command: what it touched is not to be trusted, so its requests are let go."""
        if isinstance(command, StepRequest):
            for row in command.rows:
                self.sessions.release(row.request_id, row.epoch, stream.stream_id)
        elif isinstance(command, Admission):
            self.sessions.release(command.request_id, command.epoch, stream.stream_id)


def _check_seq(stream: GatewayStream, step: StepRequest) -> None:
    """Numbers go up by one; they may start anywhere, and begin again at 1 with another channel."""
    if not 1 <= step.seq <= MAX_SEQ:
        raise InvalidRequest("seq", f"must be in 1..{MAX_SEQ}, got {step.seq}")
    expected = stream.last_seq + 1
    restarted = step.seq == 1 and stream.last_channel != (step.channel_id, step.channel_epoch)
    if stream.last_seq and step.seq != expected and not restarted:
        raise InvalidRequest("seq", f"{step.seq}, but {expected} is next")


def _is_done(flight: Flight) -> bool:
    try:
        return flight.landing.done()
    except RuntimeError:  # whoever completes it meets the same error, and knows what to do
        return True


def _fault(command: Command, kind: str, detail: str) -> FaultReply:
    match command:
        case StepRequest():
            return FaultReply(kind, detail, seq=command.seq)
        case Admission() | ReleaseRequest():
            return FaultReply(kind, detail, request_id=command.request_id)
        case Unreadable():
            return FaultReply(kind, detail, command.seq, command.request_id)
        case _:
            return FaultReply(kind, detail)
