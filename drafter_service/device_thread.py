"""Which thread carries out the commands, and whose turn is it?

One thread owns everything on the device. It goes round the streams that have something waiting. A stream alone is
waited for at length; where several wait, each gets a short look, so that one target's slow step delays nobody else.
Another one looks whether the device comes back from what it was given: one that does not is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drafter_service.channels import AttachOutcome
from drafter_service.core import DrafterCore
from drafter_service.messages import StepRequest
from drafter_service.streams import GatewayStream, Inboxes, StreamCommand, StreamEnded
from engine.device_deadline import DeviceDeadline
from engine.errors import IntegrityError

_log = logging.getLogger(__name__)

IDLE_S = 0.5  # how often an idle thread looks whether it should stop
ALONE_SLICE_S = 0.02
SHARED_SLICE_S = 0.001
PUT_S = 0.5  # how often a sender that waits for room looks whether it still should


class DeviceThread:
    """Owner of the thread. `submit` and `end_stream` may be called from any thread."""

    def __init__(
        self,
        core: DrafterCore,
        inboxes: Inboxes,
        num_threads: int | None,
        check_integrity: bool = False,
        device: torch.device | None = None,
        deadline: DeviceDeadline | None = None,
    ) -> None:
        """device: where the work runs; on a GPU the thread has a stream of its own. None: the CPU. deadline: of what
        the device is given, to be started and closed with the thread; its owner calls `lose`. None: the device may take
        any time.
        """
        self._core = core
        self._inboxes = inboxes
        self._num_threads = num_threads
        self._check_integrity = check_integrity
        self._deadline = deadline or DeviceDeadline(None, self.lose)
        self._on_gpu = device if device is not None and device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self.failed = threading.Event()
        # Why, where it was the GPU: nothing in this process can use it any more.
        self.device_error: str | None = None

    def start(self) -> None:
        """Start the threads."""
        self._deadline.start()
        self._thread.start()

    def lose(self, reason: str) -> None:
        """The device is lost: nothing more is carried out, and `failed` is set. From any thread; the device thread may
        be stuck.
        """
        _log.error("the device is lost: %s", reason)
        self.device_error = reason
        self.failed.set()
        self._inboxes.close()

    def submit(self, stream: GatewayStream, command: StreamCommand) -> bool:
        """Queue a command, waiting while the stream's inbox is full. False when it never will be."""
        while not self._inboxes.closed:
            if self._inboxes.put(stream, command, PUT_S):
                return True
            if stream.outbox.closed:
                return False
        return False

    def end_stream(self, stream: GatewayStream) -> None:
        """Queue the end of a stream, after everything it sent."""
        self._inboxes.put(stream, StreamEnded(), None)

    def holds(self, stream: GatewayStream) -> bool:
        """Whether requests of the stream are resident; a snapshot, from any thread."""
        return self._core.residents.holds(stream.stream_id)

    def num_resident(self) -> int:
        """How many requests are resident; a snapshot, from any thread."""
        return len(self._core.residents)

    def stop(self, deadline_s: float) -> None:
        """End the thread, whatever still waits, and give up its channels."""
        self._inboxes.close()
        self._thread.join(deadline_s)
        self._deadline.close()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            with self._stream():
                while not self._inboxes.closed:
                    self._round()
        except Exception as error:  # the thread's end: nothing above it would see the error, and a drafter without it
            # is useless.
            if self._on_gpu is not None and is_device_error(error):
                self.lose(str(error).partition("\n")[0])
            else:
                _log.exception("the device thread failed")
                self.failed.set()
                self._inboxes.close()
        finally:
            if self.device_error is None:  # else the process ends at once: there is no giving back
                self._core.close()

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """What the thread enqueues goes to its own stream: the default one would wait for those of other libraries."""
        if self._on_gpu is None:
            yield
            return
        index = self._on_gpu.index or 0
        torch.cuda.set_device(index)
        with torch.cuda.stream(torch.cuda.Stream(index)):
            yield

    def _round(self) -> None:
        """Look at the first command of every stream once, and at the steps that are done."""
        heads = self._inboxes.heads(IDLE_S)
        with self._deadline.over("a command"):
            self._look_at(heads)

    def _look_at(self, heads: list[tuple[GatewayStream, StreamCommand]]) -> None:
        self._core.collect()
        slice_s = ALONE_SLICE_S if len(heads) == 1 else SHARED_SLICE_S
        for stream, command in heads:
            if stream.outbox.closed and not isinstance(command, StreamEnded | AttachOutcome):
                # Nobody hears the answer: what the stream has waiting is not worth running, and holds up its end.
                self._inboxes.pop(stream, command)
                continue
            later = self._inboxes.later_plans(stream, command.channel_id) if isinstance(command, StepRequest) else 0
            if self._core.run(stream, command, later, slice_s):
                self._inboxes.pop(stream, command)
        if self._check_integrity and heads:
            try:
                self._core.check_integrity()
            except IntegrityError:
                _log.exception("after %s", [type(command).__name__ for _, command in heads])
                raise


def is_device_error(error: BaseException) -> bool:
    """Whether the GPU has failed, rather than one of our calls: the context is of no use after it."""
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.9
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
