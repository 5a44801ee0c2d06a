"""Who ends a wait that a device stream is in, when what it waits for does not come?

A stream that waits for a word in host memory waits for ever unless somebody writes it. One thread per end knows every
wait that its end has enqueued, and raises the word itself (control.raise_low) when the peer is dead, the channel is
closed, or the wait's time is up. The stream then goes on, and finds no right tag in the entry.

A word that was raised may be lowered again: the peer's device stores what it publishes, however late. So a wait is
watched, and its word raised anew, until the stream is known to be past it. The end's own device tells: with each
publication it stores, in a word that nobody else writes, how many waits lie behind it.

A dead peer has nobody who would release its streams, and they may hold up what they share with ours: under MPS all
clients' work runs in one context. So the word that the peer waits for, our own counter, is raised for it as well.

Two stores that meet are settled by the later one. A raise that undoes a publication newer than itself (they would have
to fall within the same hundred nanoseconds) costs the next wait its deadline, never more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.channel.control import ControlPage, Word, reached
from engine.errors import ChannelError

# How exactly deadlines are kept. Looking costs some twenty microseconds of the interpreter, and nothing while no wait
# is under way.
LOOK_EVERY_S = 0.005
MAX_WAITS = 4096
# A peer's waits are at most this many steps ahead of our last one.
BEYOND = 1 << 20


@dataclass(slots=True)
class _Wait:
    """One wait under way. number: its place among all waits of this end, from 1. ends: None, its time has not begun."""

    number: int
    seq: int
    time_s: float
    ends: float | None


class Watchdog:
    """The watching thread of one end. `add` by the thread that steps, `close` by any; the control page by all.

    awaited: the word waited for, the peer's counter. published: our own, which the peer waits for. passed: the word in
    which our device counts waits behind it. started_by: the word whose reaching `seq` starts the time of a wait for
    `seq`; None: its time starts at once. peer_alive: False releases everything. finish: run in the thread after
    `close`, to give things back; it calls what it is given again and again for as long as a stream may still come to a
    wait.
    """

    def __init__(
        self,
        control: ControlPage,
        awaited: Word,
        published: Word,
        passed: Word,
        started_by: Word | None,
        peer_alive: Callable[[], bool],
        finish: Callable[[Callable[[], None]], None],
    ) -> None:
        self._control = control
        self._awaited = awaited
        self._published = published
        self._passed = passed
        self._started_by = started_by
        self._peer_alive = peer_alive
        self._finish = finish
        self._waits: deque[_Wait] = deque()
        self._last: _Wait | None = None
        self._busy = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watchdog-{awaited.name.lower()}", daemon=True)
        self._thread.start()

    @property
    def num_waits(self) -> int:
        """How many waits were added so far: what a publication stores in `passed`."""
        return 0 if self._last is None else self._last.number

    def add(self, seq: int, time_s: float) -> None:
        """Watch over a wait for `seq` that is about to be enqueued. ChannelError: there are far too many under way."""
        if len(self._waits) >= MAX_WAITS:
            raise ChannelError(f"channel: {MAX_WAITS} waits are under way, and nothing was published behind them")
        ends = None if self._started_by is not None else time.monotonic() + time_s
        self._last = _Wait(self.num_waits + 1, seq, time_s, ends)
        self._waits.append(self._last)
        if not self._busy.is_set():
            self._busy.set()

    def release_all(self) -> None:
        """Raise the word to the newest wait ever added."""
        if self._last is not None:
            self._control.raise_low(self._awaited, self._last.seq)

    def close(self) -> None:
        """Release everything and let the thread finish. Idempotent; returns at once."""
        self._closing.set()
        self._busy.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to finish; False when it has not within timeout_s."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._waits:
                self._closing.wait(LOOK_EVERY_S)
                self._look()
            else:
                self._busy.wait()
                self._busy.clear()
        self._release_both()
        self._finish(self._release_both)

    def _look(self) -> None:
        passed = self._control.low(self._passed)
        while self._waits and reached(passed, self._waits[0].number):
            self._waits.popleft()
        if not self._peer_alive():  # also when no wait is left: the last publication has lowered the peer's word again
            self._release_both()
            return
        now = time.monotonic()
        for wait in list(self._waits):  # a copy: more may be added meanwhile
            if wait.ends is None and self._has_started(wait.seq):
                wait.ends = now + wait.time_s
            if wait.ends is not None and now >= wait.ends:
                self._control.raise_low(self._awaited, wait.seq)

    def _release_both(self) -> None:
        """Our streams, and those of a peer that is dead or will hear of nothing more."""
        self.release_all()
        if self._last is not None:
            self._control.raise_low(self._published, self._last.seq + BEYOND)

    def _has_started(self, seq: int) -> bool:
        return self._started_by is None or reached(self._control.low(self._started_by), seq)
