"""Who runs the commands, and in which order?

One thread owns everything on the device. Commands of all streams wait for it in one bounded queue, first come, first
served; what a stream sent stays in order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from target_service.core import TargetCore
from target_service.messages import Command, ReleaseRequest
from target_service.streams import GatewayStream

_log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25  # how often an idle device looks for channels to close
FULL_POLL_S = 0.25  # how often a sender that waits for room looks whether it still should


@dataclass(frozen=True, slots=True)
class _Job:
    """command None: the stream has ended."""

    stream: GatewayStream
    command: Command | None


class DeviceThread:
    """Owner of the thread. `submit` and `end_stream` may be called from any thread.

    on_failure: called by the thread when it ends by a bug; no command is carried out any more.
    """

    def __init__(
        self, core: TargetCore, max_commands: int, num_threads: int | None, on_failure: Callable[[], object]
    ) -> None:
        self._core = core
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._jobs: queue.Queue[_Job] = queue.Queue(max_commands)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
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

    def num_resident(self) -> int:
        """How many requests are resident and will run on; a snapshot, from any thread."""
        return 0 if self._stopping.is_set() else len(self._core.sessions)

    def stop(self, deadline_s: float) -> None:
        """Finish the command at hand and end the thread."""
        self._stopping.set()
        self._thread.join(deadline_s)

    def _put(self, job: _Job) -> bool:
        while not self._stopping.is_set():
            if job.command is not None and job.stream.outbox.closed:
                return False
            try:
                self._jobs.put(job, timeout=FULL_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # again here: OpenMP keeps it per thread
        try:
            self._carry_out_all()
        except Exception:  # a thread that died unnoticed would leave a process that listens and never answers
            _log.exception("the device thread ended")
            self._stopping.set()
            self._on_failure()

    def _carry_out_all(self) -> None:
        with torch.inference_mode():
            while not self._stopping.is_set():
                try:
                    job = self._jobs.get(timeout=IDLE_POLL_S)
                except queue.Empty:
                    self._core.channels.close_retired()
                    continue
                self._carry_out(job)
                self._core.channels.close_retired()

    def _carry_out(self, job: _Job) -> None:
        stream = job.stream
        if job.command is None:
            self._core.end_stream(stream)
            stream.outbox.close()
        elif not stream.outbox.closed:
            event = self._core.handle(stream, job.command)
            if not stream.outbox.put(event):
                _log.warning("stream %d is broken or does not read its events: closed", stream.stream_id)
                self._core.end_stream(stream)
