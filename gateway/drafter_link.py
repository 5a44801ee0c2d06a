"""Is there a drafter to draft with right now, and through which channel?

Keeps one stream to one drafter for one target: connects, opens a channel to the target, opens it anew when either of
the two has restarted or the channel has let them down. Nobody ever waits for it: while it is not `ready` the target
loop plans without a drafter. Its loss is told once, and what the drafter held is then forgotten.

A drafter that is late once is told of every step still, so that it has no hole, but no drafts are asked for until it
has caught up; after each miss in a row a little later. It answers in the order in which it is told, so the answer to
the newest thing told shows that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from enum import Enum

from gateway.clients import DrafterStream, StreamLost
from gateway.messages import (
    Admitted,
    ChannelOpened,
    DrafterEvent,
    DrafterInfo,
    DraftReport,
    Fault,
    Placement,
    Released,
    StepPlan,
)

_log = logging.getLogger(__name__)

HANG_S = 10.0  # a drafter that says nothing for so long when it should is reconnected to
MAX_PAUSE_S = 10.0  # before drafts, or a channel that was refused, are asked for again
CALM_STEPS = 50  # steps without a miss after which an earlier miss is forgiven


class LinkState(Enum):
    """How far the link is."""

    CONNECTING = "connecting"
    WAITING_FOR_TARGET = "waiting for target"
    OPENING = "opening"
    READY = "ready"


class DrafterLink:
    """One drafter, as one target's requests see it.

    The callbacks run synchronously on the event loop: on_ready (a channel is open), on_lost (no channel any more, or
    another one; nothing is resident), on_admitted, on_report. max_ahead: steps under way at once.
    """

    def __init__(
        self,
        address: str,
        target_address: str,
        gateway_id: str,
        reconnect_min_s: float,
        reconnect_max_s: float,
        max_queued: int,
        on_ready: Callable[[], None],
        on_lost: Callable[[], None],
        on_admitted: Callable[[Admitted], None],
        on_report: Callable[[DraftReport], None],
        max_ahead: int,
    ) -> None:
        self.address = address
        self.info: DrafterInfo | None = None
        self.channel: ChannelOpened | None = None
        self.detail = "not connected yet"
        self.was_ready = False
        self._state = LinkState.CONNECTING
        self._target_address = target_address
        self._gateway_id = gateway_id
        self._reconnect_min_s = reconnect_min_s
        self._reconnect_max_s = reconnect_max_s
        self._max_queued = max_queued
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_admitted = on_admitted
        self._on_report = on_report
        self._max_ahead = max_ahead
        self._target_instance: str | None = None
        self._resident: dict[str, int] = {}  # what the drafter was asked to hold on this stream, and its epoch
        self._stream: DrafterStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._misses = 0
        self._steps_since_miss = 0
        self._lagging = False
        self._resume_at = 0.0
        self._refusals = 0
        self._last_sent = 0  # steps of this channel
        self._last_followed = 0

    @property
    def state(self) -> LinkState:
        """How far the link is."""
        return self._state

    @property
    def ready(self) -> bool:
        """Whether plans may name the channel."""
        return self._state is LinkState.READY

    @property
    def keeps_up(self) -> bool:
        """Whether drafts may be asked for, and new requests be given to it."""
        return self.ready and not self._lagging and time.monotonic() >= self._resume_at

    async def run(self) -> None:
        """Keep the link until cancelled."""
        pause = self._reconnect_min_s
        try:
            while True:
                self._stream = DrafterStream(self.address, self._on_event, self._max_queued)
                self._set_timer(HANG_S, self._give_up)  # until hello is answered
                reason = await self._stream.converse(self._gateway_id)
                connected = self.info is not None
                if connected or self.detail != reason:
                    _log.log(
                        logging.WARNING if connected else logging.INFO, "no drafter at %s: %s", self.address, reason
                    )
                self._forget(reason)
                pause = self._reconnect_min_s if connected else min(2 * pause, self._reconnect_max_s)
                await asyncio.sleep(pause)
        finally:
            self._cancel_timer()

    # What the target loop tells it.

    def target_up(self, instance_id: str) -> None:
        """The target is connected; a channel of an older instance is worthless."""
        self._target_instance = instance_id
        self._refusals = 0
        if self.info is not None:
            self._open()

    def target_down(self) -> None:
        """The target is gone, and its channel with it."""
        self._target_instance = None
        if self.info is not None:
            self._close_channel(LinkState.WAITING_FOR_TARGET, "the target is gone")

    def admit(self, placement: Placement) -> bool:
        """Ask the drafter to follow a request. False: the link broke."""
        stream = self._stream
        if not self.ready or stream is None:
            return False
        try:
            stream.admit(placement)
        except StreamLost:
            return False
        self._resident[placement.request_id] = placement.epoch
        return True

    def release(self, request_id: str) -> None:
        """The drafter need not follow a request any more; nothing happens when it does not."""
        epoch = self._resident.pop(request_id, None)
        if epoch is not None and self._stream is not None:
            with contextlib.suppress(StreamLost):  # the drafter drops everything with its stream; `run` tells the loss
                self._stream.release(request_id, epoch)

    def plan(self, plan: StepPlan) -> None:
        """Tell the drafter of a step with its channel."""
        self._last_sent = plan.seq
        if self._stream is not None:
            with contextlib.suppress(StreamLost):  # as above; the target waits for drafts no longer than the deadline
                self._stream.plan(plan)

    def step_done(self, missed: bool) -> None:
        """A step that waited for drafts is done. missed: in vain."""
        if not missed:
            self._steps_since_miss += 1
            if self._steps_since_miss >= CALM_STEPS:
                self._misses = 0
            return
        if not self._lagging:  # else it is the same miss, seen by a step that was on its way
            self._miss()

    def unanswered(self) -> None:
        """It did not answer an admission in time."""
        self._miss()

    def _miss(self) -> None:
        pause = self._count_miss("drafts did not come in time")
        self._lagging = True
        self._resume_at = time.monotonic() + pause
        self._set_timer(HANG_S, self._give_up)

    def step_failed(self) -> None:
        """A step that the drafter was told of comes through the channel no more."""
        self._reopen_later("the target could not run a step")

    def _count_miss(self, reason: str) -> float:
        """Returns the pause before the next attempt, in seconds."""
        self._steps_since_miss = 0
        self._misses += 1
        pause = min(self._reconnect_min_s * 2.0 ** min(self._misses, 16), MAX_PAUSE_S)
        _log.warning("drafter %s: %s; no drafting for %.1f s at least", self.address, reason, pause)
        self.detail = reason
        return pause

    # What the drafter tells it.

    def _on_event(self, event: DrafterEvent) -> None:
        match event:
            case DraftReport():
                if self.channel is not None and event.channel_id == self.channel.channel_id:
                    self._follow(event)
            case Admitted():
                if self._resident.get(event.request_id) == event.epoch:
                    self._on_admitted(event)
                    self._see_how_far()
            case DrafterInfo():
                self.info = event
                self._cancel_timer()
                if self._target_instance is None:
                    self._state = LinkState.WAITING_FOR_TARGET
                else:
                    self._open()
            case ChannelOpened():
                self._opened(event)
            case Fault():
                _log.warning("drafter %s: %s: %s", self.address, event.kind, event.detail)
                if event.seq and self.ready:  # it could not take part in a step: it has a hole now, or no channel
                    self._reopen_later("it could not follow a step")
            case Released():
                pass

    def _open(self) -> None:
        """Ask for a channel to the target as it is now."""
        if self._stream is None or self._target_instance is None:
            return
        self._close_channel(LinkState.OPENING, "opening a channel")
        try:
            self._stream.open_channel(self._target_address)
        except StreamLost:
            return
        self._set_timer(HANG_S, self._give_up)

    def _follow(self, report: DraftReport) -> None:
        """Where the drafter is."""
        self._on_report(report)
        if report.missed:  # it has a hole, or the channel carries nothing any more
            self._reopen_later("it missed a step")
        else:
            self._last_followed = report.seq
            self._see_how_far()

    def _see_how_far(self) -> None:
        """It has answered: it is caught up, or given more time."""
        if not self._lagging:
            return
        if self._last_followed + self._max_ahead >= self._last_sent:
            self._lagging = False
            self._cancel_timer()
            self.detail = ""
        else:
            self._set_timer(HANG_S, self._give_up)

    def _reopen_later(self, reason: str) -> None:
        pause = self._count_miss(reason)
        self._close_channel(LinkState.OPENING, reason)
        self._set_timer(pause, self._open)

    def _give_up(self) -> None:
        if self._stream is not None:
            self._stream.close(f"no answer within {HANG_S:g} s")

    def _opened(self, event: ChannelOpened) -> None:
        if self._state is not LinkState.OPENING or self._target_instance is None:
            return
        if event.ok and event.target_instance_id == self._target_instance:
            self._cancel_timer()
            self.channel = event
            self._state = LinkState.READY
            self.was_ready = True
            self.detail = ""
            self._refusals = self._last_sent = self._last_followed = 0
            _log.info("drafting with %s over %s", self.address, event.kind)
            self._on_ready()
            return
        # Not ok, or attached to an instance of the target that is not the one connected here: it is restarting.
        detail = event.detail or "attached to another instance of the target"
        if detail != self.detail:
            _log.warning("drafter %s opened no channel: %s", self.address, detail)
        self.detail = detail
        pause = min(self._reconnect_max_s * 2.0 ** min(self._refusals, 16), MAX_PAUSE_S)
        self._refusals += 1
        self._set_timer(pause, self._open)

    def _close_channel(self, state: LinkState, detail: str) -> None:
        """No plan names the channel from here on, and the drafter is told to drop what it holds for us."""
        had = self.channel is not None
        self._cancel_timer()
        self.channel = None
        self._lagging = False
        self._state = state
        if had:
            self.detail = detail
        for request_id in list(self._resident):
            self.release(request_id)
        if had:
            self._on_lost()

    def _forget(self, reason: str) -> None:
        """The stream is over."""
        self._stream = None
        self.info = None
        self._refusals = 0
        self._resident.clear()
        self._close_channel(LinkState.CONNECTING, reason)
        self.detail = reason

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
