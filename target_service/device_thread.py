"""Who runs the commands, and in which order?

One thread owns everything on the device. Commands of all streams wait for it in one bounded queue, first come, first
served; what a stream sent, and what it is told, stays in order. Steps that were launched and are not done are watched
by a second thread, which does nothing but wait for them. A third one looks whether either of them is stuck: a device
that does not come back is lost.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from engine.device_deadline import DeviceDeadline
from engine.errors import RanksLost
from target_service.core import TargetCore
from target_service.failures import DeviceLost
from target_service.flights import Flight
from target_service.inbox import Inbox
from target_service.messages import Command, Event, ReleaseRequest
from target_service.streams import GatewayStream

_log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25  # how often an idle device looks for channels to close
FULL_POLL_S = 0.25  # how often a sender that waits for room looks whether it still should
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Job:
    """command None: the stream has ended."""

    stream: GatewayStream
    command: Command | None


class DeviceThread:
    """Owner of the thread. `submit` and `end_stream` may be called from any thread.

    device, stream: what the thread's work runs on; stream None: the device's default. on_failure: called, from any
    thread, when no command is carried out any more: a bug has ended the thread, or the device is lost. lost: why, when
    the device was. deadline_s: the most that a command, or a step once those before it are done, may take on the
    device; None: anything.
    """

    def __init__(
        self,
        core: TargetCore,
        max_commands: int,
        num_threads: int | None,
        on_failure: Callable[[], object],
        device: torch.device = _CPU,
        stream: torch.cuda.Stream | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._core = core
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._device = device
        self._stream = stream
        self.lost = ""
        self._inbox: Inbox[_Job, Flight] = Inbox(max_commands)
        # What streams are to be told, in order: an event, a step under way, or (None) that the stream has ended.
        self._outcomes: deque[tuple[GatewayStream, Event | Flight | None]] = deque()
        self._watched: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._deadline = DeviceDeadline(deadline_s, self._lose)
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="device-watcher", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._deadline.start()
        self._watcher.start()
        self._thread.start()

    def submit(self, stream: GatewayStream, command: Command) -> bool:
        """Queue a command, waiting while the queue is full. False when it never will be: stopping, or the stream's
        end.
        """
        if isinstance(command, ReleaseRequest):
            stream.withdrawn.add((command.request_id, command.epoch))
        return self._put(_Job(stream, command))

    def end_stream(self, stream: GatewayStream) -> None:
        """Queue the end of a stream, after everything it sent."""
        self._put(_Job(stream, None))

    def holds(self, stream: GatewayStream) -> bool:
        """Whether requests of the stream are resident; a snapshot, from any thread."""
        return self._core.sessions.holds(stream.stream_id)

    def num_resident(self) -> int:
        """How many requests are resident and will run on; a snapshot, from any thread."""
        return 0 if self._stopping.is_set() else len(self._core.sessions)

    def stop(self, deadline_s: float) -> None:
        """Finish the command at hand and the steps under way, and end the threads."""
        self._stopping.set()
        self._thread.join(deadline_s)
        self._deadline.close()

    def _put(self, job: _Job) -> bool:
        while not self._stopping.is_set():
            if job.command is not None and job.stream.outbox.closed:
                return False
            if self._inbox.put(job, FULL_POLL_S):
                return True
        return False

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # again here: OpenMP keeps it per thread
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.inference_mode(), self._on_stream():
                self._carry_out_all()
        except DeviceLost as lost:
            self._lose(str(lost))
        except RanksLost as lost:
            # Without a cause it is no fault of this process, and its words say all.
            _log.error("the device thread ended: %s", lost, exc_info=lost.__cause__ is not None)
            self._fail()
        except Exception:  # a thread that died unnoticed would leave a process that listens and never answers
            _log.exception("the device thread ended")
            self._fail()
        finally:
            self._watched.put(None)

    def _lose(self, reason: str) -> None:
        _log.error("the device is lost: %s", reason)
        self.lost = reason
        self._fail()

    def _fail(self) -> None:
        self._stopping.set()
        self._on_failure()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _watch(self) -> None:
        """Wait for each step under way, in order, and tell the device thread, which completes it."""
        for flight in iter(self._watched.get, None):
            if flight.reply is not None:
                continue  # completed meanwhile; what one would wait on may be a later step's by now
            try:
                with self._deadline.over(f"step {flight.step.seq}"):
                    flight.landing.wait()
            except RuntimeError as error:  # the device thread meets the same error when it completes the step
                _log.error("step %d: %s", flight.step.seq, error)
            self._inbox.tell(flight)

    def _carry_out_all(self) -> None:
        poll_s = IDLE_POLL_S
        while not self._stopping.is_set():
            job, flight = self._inbox.take(poll_s)
            with self._deadline.over("a command"):
                poll_s = self._turn(job, flight)
        with self._deadline.over("what was under way at the end"):
            self._core.settle()
        self._tell()

    def _turn(self, job: _Job | None, flight: Flight | None) -> float:
        """Do the one thing there is to do, if any. Returns how long to wait for the next."""
        poll_s = IDLE_POLL_S
        if flight is not None:
            self._core.land(flight)
        elif job is not None:
            self._core.land_done()  # nobody shall wait for what is known while the next step waits for its drafts
            self._tell()
            self._carry_out(job)
        elif self._core.idle():
            poll_s = 0.0  # there may be more to do
        self._tell()
        self._core.channels.close_retired()
        return poll_s

    def _carry_out(self, job: _Job) -> None:
        stream = job.stream
        if job.command is None:
            self._core.end_stream(stream)
            self._outcomes.append((stream, None))
        elif not stream.outbox.closed:
            outcome = self._core.handle(stream, job.command)
            self._outcomes.append((stream, outcome))
            if isinstance(outcome, Flight) and outcome.reply is None:
                self._watched.put(outcome)

    def _tell(self) -> None:
        """Send what is known, up to the first step that is still under way."""
        outcomes = self._outcomes
        while outcomes:
            stream, outcome = outcomes[0]
            event = outcome.reply if isinstance(outcome, Flight) else outcome
            if event is None and outcome is not None:
                return
            outcomes.popleft()
            if event is None:
                stream.outbox.close()
                continue
            was_open = not stream.outbox.closed
            if not stream.outbox.put(event):
                if was_open:
                    _log.warning("stream %d is broken or does not read its events: closed", stream.stream_id)
                self._core.end_stream(stream)
