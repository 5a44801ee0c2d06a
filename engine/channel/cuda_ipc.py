"""How do the two ends share a GPU's memory and wait for each other on the GPU?

Kind `cuda_ipc`, the device interface between two processes of one host. All regions lie in one device allocation of
the target's, laid out as in shared memory, which the drafter maps once. The control page stays in POSIX shared memory
and is registered with CUDA in both processes: streams wait for its counters and store them, hosts can read and raise
them. Only the low 32 bits of a counter are used, compared cyclically.

A closed end lets go in its watchdog's thread: first its streams must be past everything that touches the page, then
the target keeps the memory until the drafter has unmapped it, or is dead.
"""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import partial

import torch

from engine.channel.control import ControlPage, DrafterState, Heartbeat, State, Word
from engine.channel.deadline import Deadline
from engine.channel.description import ChannelDescription
from engine.channel.device import ReplyViews
from engine.channel.futex import Futex
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.layout import CONTROL_BYTES, describe_layout, plan_layout, spec_of
from engine.channel.memory import ExportedMemory, attach_memory
from engine.channel.stream_driver import DevicePage, StreamDriver
from engine.channel.views import EntryViews, region_tensors
from engine.channel.watchdog import LOOK_EVERY_S, Watchdog
from engine.errors import ChannelError

_log = logging.getLogger(__name__)

KIND = "cuda_ipc"
# How long a closing end goes on in silence while its device is not past the channel, and how long the target waits for
# a drafter that lives and has not unmapped.
PATIENCE_S = 30.0


class _DeviceEnd(ABC):
    """What both ends have: views of the entries, waits and publications on the current stream, and their watchdog."""

    def __init__(
        self,
        spec: ChannelSpec,
        driver: StreamDriver,
        page: DevicePage,
        views: EntryViews,
        watchdog: Watchdog,
        streams: set[Hashable],
        words: tuple[Word, Word, Word],
    ) -> None:
        """words: the counter waited for, the one published, and the one in which waits behind us are counted."""
        self.spec = spec
        self.kind = KIND
        self.device = driver.device
        self._driver = driver
        self._page = page
        self._views: EntryViews | None = views
        self._watchdog = watchdog
        self._streams = streams
        self._awaited, self._counter, self._passed = words
        self._published = 0
        self._lock = threading.Lock()  # nothing is enqueued once the end is closed

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """See DeviceTargetEnd.ring and DeviceDrafterEnd.ring."""
        return self._open_views().ring(seq)

    def reply(self, seq: int) -> ReplyViews:
        """See DeviceTargetEnd.reply and DeviceDrafterEnd.reply."""
        return self._open_views().reply(seq)

    @abstractmethod
    def peer_alive(self) -> bool:
        """Of the peer, by its heartbeat."""

    def close(self) -> None:
        """See DeviceTargetEnd.close and DeviceDrafterEnd.close."""
        with self._lock:
            self._views = None

    def wait_closed(self, timeout_s: float) -> bool:
        """After `close`: wait until this end has let go of everything but what its views hold. False: not yet."""
        return self._watchdog.join(timeout_s)

    def _wait(self, seq: int, deadline_s: float) -> None:
        stream = self._driver.current_stream()
        with self._lock:
            self._open_views()
            if deadline_s <= 0 or not self.peer_alive():
                return  # no time, or nothing to wait for; the tag tells what has come
            self._streams.add(stream)
            self._watchdog.add(seq, deadline_s)
            self._driver.wait_value(stream, self._page, ControlPage.offset(self._awaited), seq)

    def _publish(self, seq: int) -> None:
        stream = self._driver.current_stream()
        with self._lock:
            self._open_views()
            if seq <= self._published:
                raise ChannelError(f"seq: step {seq} is not after step {self._published}, already published")
            self._streams.add(stream)
            # The waits behind the counter, so that they cost the peer nothing.
            counter, passed = ControlPage.offset(self._counter), ControlPage.offset(self._passed)
            self._driver.write_values(stream, self._page, ((counter, seq), (passed, self._watchdog.num_waits)))
            self._published = seq

    def _open_views(self) -> EntryViews:
        views = self._views
        if views is None:
            raise ChannelError(f"channel {self.spec.channel_id} is closed")
        return views


class CudaIpcTargetEnd(_DeviceEnd):
    """The target's end: makes the memory and frees it. See device.DeviceTargetEnd."""

    def __init__(
        self,
        spec: ChannelSpec,
        driver: StreamDriver,
        heartbeat_deadline_s: float,
        attach_deadline_s: float,
        futex: Futex | None = None,
    ) -> None:
        """ChannelError: a field of the spec is impossible, or the device or /dev/shm has no room."""
        layout = plan_layout(spec)
        export = driver.allocate(layout.num_bytes)
        self._shared = ExportedMemory(CONTROL_BYTES)
        control = ControlPage(self._shared.buffer, futex or Futex())
        control.format(layout.num_bytes, spec.epoch, spec.channel_id)
        page = driver.register(self._shared.buffer)
        heartbeat = Heartbeat(control, Word.TARGET_BEAT_NS, heartbeat_deadline_s)
        self._control = control
        self._handle = export.handle
        deadline_ns = int(heartbeat_deadline_s * 1e9)
        self._alive = _drafter_alive(control, deadline_ns, int(attach_deadline_s * 1e9))
        streams: set[Hashable] = set()
        finish = _Finish(driver, streams, page, heartbeat, export.memory)
        words = (Word.DRAFTER_SEQ, Word.TARGET_SEQ, Word.TARGET_WAITS)
        watchdog = Watchdog(control, *words, Word.TARGET_SEQ, self._alive, partial(finish.target, control, deadline_ns))
        views = EntryViews(spec, region_tensors(export.memory, layout))
        super().__init__(spec, driver, page, views, watchdog, streams, words)
        # Also when nobody called close.
        self._end = weakref.finalize(self, _end_target, control, watchdog, self._shared)

    def describe(self) -> ChannelDescription:
        """What a drafter needs to attach."""
        return describe_layout(self.spec, KIND, self._shared.name.encode(), self._handle, self._driver.uuid)

    def wait_reply(self, seq: int, deadline_s: float) -> None:
        """See DeviceTargetEnd.wait_reply. ChannelError: step `seq` was not published here, so nobody could reply."""
        if seq > self._published:
            raise ChannelError(f"seq: step {seq} was not published ({self._published} was the last)")
        self._wait(seq, deadline_s)

    def release_waits(self) -> None:
        """See DeviceTargetEnd.release_waits."""
        with self._lock:
            if self._views is not None:
                self._watchdog.release_all()

    def publish(self, seq: int) -> None:
        """See DeviceTargetEnd.publish."""
        self._publish(seq)

    def peer_alive(self) -> bool:
        """See DeviceTargetEnd.peer_alive."""
        return self._alive()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._control.closed

    def close(self) -> None:
        """See DeviceTargetEnd.close."""
        super().close()
        self._end()


class CudaIpcDrafterEnd(_DeviceEnd):
    """The drafter's end: a mapping of the target's memory. See device.DeviceDrafterEnd."""

    def __init__(
        self,
        description: ChannelDescription,
        driver: StreamDriver,
        heartbeat_deadline_s: float,
        futex: Futex | None = None,
    ) -> None:
        """ChannelError: the memory is not there, is not what the description says, or this device cannot reach it."""
        spec = spec_of(description)
        layout = plan_layout(spec)
        region = description.regions[0]
        buffer = attach_memory(description.control.handle.decode(errors="replace"), CONTROL_BYTES)
        control = ControlPage(buffer, futex or Futex())
        control.check(layout.num_bytes, spec.epoch, spec.channel_id)
        heartbeat = Heartbeat(control, Word.DRAFTER_BEAT_NS, heartbeat_deadline_s)
        # Before the memory is opened: a target that closes from now on waits for us.
        control.set(Word.DRAFTER_STATE, DrafterState.ATTACHED)
        unmapped = threading.Event()

        def on_closed() -> None:
            control.set(Word.DRAFTER_STATE, DrafterState.UNMAPPED)
            unmapped.set()

        try:
            memory = driver.open(region.handle, layout.num_bytes, region.device_uuid, on_closed)
            page = driver.register(buffer)
        except BaseException:
            heartbeat.stop()
            control.set(Word.DRAFTER_STATE, DrafterState.DETACHED)
            raise
        self._control = control
        self._detached = threading.Event()
        self._alive = _target_alive(control, self._detached, int(heartbeat_deadline_s * 1e9))
        streams: set[Hashable] = set()
        finish = _Finish(driver, streams, page, heartbeat, memory)
        words = (Word.TARGET_SEQ, Word.DRAFTER_SEQ, Word.DRAFTER_WAITS)
        watchdog = Watchdog(control, *words, None, self._alive, partial(finish.drafter, unmapped))
        views = EntryViews(spec, region_tensors(memory, layout))
        super().__init__(spec, driver, page, views, watchdog, streams, words)
        self._end = weakref.finalize(self, _end_drafter, control, watchdog, self._detached)

    def wait_entry(self, seq: int, deadline_s: float) -> None:
        """See DeviceDrafterEnd.wait_entry."""
        self._wait(seq, deadline_s)

    def publish_reply(self, seq: int) -> None:
        """See DeviceDrafterEnd.publish_reply."""
        self._publish(seq)

    def peer_alive(self) -> bool:
        """See DeviceDrafterEnd.peer_alive."""
        return self._alive()

    @property
    def closed(self) -> bool:
        """Whether either end has closed."""
        return self._detached.is_set() or self._control.closed

    def close(self) -> None:
        """See DeviceDrafterEnd.close."""
        super().close()
        self._end()


class _Finish:
    """What a closed end still has to give back, and in which order. Runs in the watchdog's thread, holds no end."""

    def __init__(
        self,
        driver: StreamDriver,
        streams: set[Hashable],
        page: DevicePage,
        heartbeat: Heartbeat,
        memory: torch.Tensor,
    ) -> None:
        self._driver = driver
        self._streams = streams
        self._page = page
        self._heartbeat = heartbeat
        self._memory: torch.Tensor | None = memory
        self._never = threading.Event()  # to sleep on: a device has no way to wake this thread

    def target(self, control: ControlPage, deadline_ns: int, release: Callable[[], None]) -> None:
        """Page, then memory once the drafter has let go of it. deadline_ns: of its heartbeat."""
        self._heartbeat.stop()
        self._leave_page(release)
        patience = Deadline(PATIENCE_S)
        while control.drafter_maps(deadline_ns):
            if patience.passed:
                _log.warning("the drafter lives and has not unmapped within %.0f s", PATIENCE_S)
                break
            self._never.wait(LOOK_EVERY_S)
        self._memory = None

    def drafter(self, unmapped: threading.Event, release: Callable[[], None]) -> None:
        """Page, then the mapping; the heart beats until it is gone, which sets `unmapped`."""
        self._leave_page(release)
        self._memory = None
        if not unmapped.wait(PATIENCE_S):
            _log.warning("channel memory is still in use %.0f s after its end", PATIENCE_S)
        self._heartbeat.stop()

    def _leave_page(self, release: Callable[[], None]) -> None:
        """Take the page from the device, once its streams are past all that touches it."""
        patience = Deadline(PATIENCE_S)
        warned = False
        try:
            marks = [self._driver.mark(stream) for stream in self._streams]
            while not all(passed() for passed in marks):
                release()
                if patience.passed and not warned:
                    warned = True  # and go on: the page must not be pulled from under a device that may still use it
                    _log.warning("%s is not past a closed channel after %.0f s", self._driver.device, PATIENCE_S)
                self._never.wait(LOOK_EVERY_S)
        except ChannelError as error:
            _log.warning("%s: %s", self._driver.device, error)  # a device that has failed runs nothing any more
        self._page.close()


def _drafter_alive(control: ControlPage, deadline_ns: int, attach_ns: int) -> Callable[[], bool]:
    return lambda: control.drafter_alive(deadline_ns, attach_ns)


def _target_alive(control: ControlPage, detached: threading.Event, deadline_ns: int) -> Callable[[], bool]:
    return lambda: not detached.is_set() and control.target_alive(deadline_ns)


def _end_target(control: ControlPage, watchdog: Watchdog, shared: ExportedMemory) -> None:
    control.set(Word.STATE, State.CLOSED)
    control.wake_all()
    watchdog.close()
    shared.close()


def _end_drafter(control: ControlPage, watchdog: Watchdog, detached: threading.Event) -> None:
    detached.set()
    control.set(Word.DRAFTER_STATE, DrafterState.DETACHED)
    control.wake_all()
    watchdog.close()
