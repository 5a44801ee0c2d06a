"""What do the two ends of a channel tell each other beside the data: how far each is, that it lives, that it is over?

The control page: 64-bit words, one cache line each, every word with a single writer except `state`, which only ever
goes from open to closed. A waiter sleeps on the other end's counter (engine/channel/futex.py says how and in which
order things are seen) and looks up a few times a second, so that a peer that was killed, which wakes nobody, is
noticed.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import threading
import time
from enum import IntEnum

from engine.channel.futex import Futex
from engine.channel.layout import CONTROL_BYTES
from engine.errors import ChannelError

MAGIC = 0x31_52_44_49_52_54_55_4F  # "OUTRIDR1", little-endian; the digit is the layout's version
WORD_STRIDE = 64
# The longest a waiter goes without looking whether its peer lives and the channel is open.
LOOK_UP_S = 0.05
HEARTBEATS_PER_DEADLINE = 8


class Word(IntEnum):
    """Where each word lies, in units of WORD_STRIDE. Times are CLOCK_MONOTONIC nanoseconds, one clock for a host."""

    MAGIC = 0
    NUM_BYTES = 1
    EPOCH = 2
    CHANNEL_HASH = 3
    STATE = 4
    TARGET_SEQ = 5
    DRAFTER_SEQ = 6
    OPENED_NS = 7
    TARGET_BEAT_NS = 8
    DRAFTER_BEAT_NS = 9
    DRAFTER_STATE = 10
    # Kind `cuda_ipc`: how many waits of its own each end's device has behind it, low 32 bits (see watchdog.py).
    TARGET_WAITS = 11
    DRAFTER_WAITS = 12


class State(IntEnum):
    """Of the channel."""

    OPEN = 1
    CLOSED = 2


class DrafterState(IntEnum):
    """Of the drafter's end. A channel is attached once; a drafter that comes again gets a new channel.

    DETACHED: it is not coming back. UNMAPPED: and its process has let go of the device memory (`cuda_ipc` only).
    """

    ABSENT = 0
    ATTACHED = 1
    DETACHED = 2
    UNMAPPED = 3


def reached(low: int, number: int) -> bool:
    """Whether a counter whose low 32 bits are `low` has come to `number`: cyclic, as CUDA's stream waits compare."""
    return (low - number) & 0xFFFFFFFF < 1 << 31


class ControlPage:
    """Typed access to a mapped control page. Holds the mapping alive; both ends and their threads share one object."""

    def __init__(self, buffer: mmap.mmap, futex: Futex) -> None:
        self._futex = futex
        assert len(Word) * WORD_STRIDE <= CONTROL_BYTES
        self._words = [ctypes.c_uint64.from_buffer(buffer, word * WORD_STRIDE) for word in Word]
        # Little-endian: the low half of a counter, the one that always changes, is at the counter's own address.
        self._halves = [ctypes.c_uint32.from_buffer(buffer, word * WORD_STRIDE) for word in Word]

    def format(self, num_bytes: int, epoch: int, channel_id: str) -> None:
        """Write the fixed words of a new channel; the magic last, since it says that the others are there."""
        self.set(Word.NUM_BYTES, num_bytes)
        self.set(Word.EPOCH, epoch)
        self.set(Word.CHANNEL_HASH, _hash(channel_id))
        self.set(Word.STATE, State.OPEN)
        self.set(Word.OPENED_NS, time.monotonic_ns())
        self._futex.fence()
        self.set(Word.MAGIC, MAGIC)

    def check(self, num_bytes: int, epoch: int, channel_id: str) -> None:
        """ChannelError when this is not the page of that channel, it is closed, or somebody attached to it before."""
        for word, expected in (
            (Word.MAGIC, MAGIC),
            (Word.NUM_BYTES, num_bytes),
            (Word.EPOCH, epoch),
            (Word.CHANNEL_HASH, _hash(channel_id)),
            (Word.STATE, State.OPEN),
            (Word.DRAFTER_STATE, DrafterState.ABSENT),
        ):
            if (found := self.get(word)) != expected:
                raise ChannelError(f"control.{word.name.lower()}: is {found:#x}, expected {expected:#x}")

    def get(self, word: Word) -> int:
        """One aligned 8-byte load."""
        value: int = self._words[word].value
        return value

    def set(self, word: Word, value: int) -> None:
        """One aligned 8-byte store."""
        self._words[word].value = value

    def advance(self, word: Word, value: int) -> None:
        """Publish: everything written before is seen by whoever sees the new value."""
        self._futex.fence()
        self.set(word, value)
        self._futex.wake(self._halves[word])

    def low(self, word: Word) -> int:
        """The word's low 32 bits, which is what a device waits on and writes; its address is `offset(word)`."""
        value: int = self._halves[word].value
        return value

    def raise_low(self, word: Word, number: int) -> None:
        """Bring the low 32 bits up to `number`, if they are not there yet: this releases whatever waits for it."""
        if not reached(self.low(word), number):
            self._halves[word].value = number & 0xFFFFFFFF

    @staticmethod
    def offset(word: Word) -> int:
        """Where a word lies, in bytes into the page."""
        return word * WORD_STRIDE

    def fence(self) -> None:
        """See Futex.fence."""
        self._futex.fence()

    @property
    def closed(self) -> bool:
        """Whether the target has closed the channel."""
        return self.get(Word.STATE) == State.CLOSED

    def wake_all(self) -> None:
        """Make every waiter, on either end, look up now."""
        self._futex.wake(self._halves[Word.TARGET_SEQ])
        self._futex.wake(self._halves[Word.DRAFTER_SEQ])

    def target_alive(self, deadline_ns: int) -> bool:
        """Whether the target's heartbeat is younger than deadline_ns and the channel open."""
        return not self.closed and time.monotonic_ns() - self.get(Word.TARGET_BEAT_NS) < deadline_ns

    def drafter_alive(self, deadline_ns: int, attach_ns: int) -> bool:
        """Whether the drafter's heartbeat is younger than deadline_ns, or the channel than attach_ns before it came."""
        state = self.get(Word.DRAFTER_STATE)
        if state == DrafterState.ABSENT:
            return not self.closed and time.monotonic_ns() - self.get(Word.OPENED_NS) < attach_ns
        if state != DrafterState.ATTACHED or self.closed:
            return False
        return time.monotonic_ns() - self.get(Word.DRAFTER_BEAT_NS) < deadline_ns

    def drafter_maps(self, deadline_ns: int) -> bool:
        """Whether a living drafter may have the device memory mapped (`cuda_ipc`)."""
        maps = self.get(Word.DRAFTER_STATE) in (DrafterState.ATTACHED, DrafterState.DETACHED)
        return maps and time.monotonic_ns() - self.get(Word.DRAFTER_BEAT_NS) < deadline_ns

    def sleep(self, word: Word, seen: int, timeout_s: float) -> None:
        """Sleep until `word` is no longer `seen`, somebody calls wake_all, or timeout_s or LOOK_UP_S has passed."""
        self._futex.wait(self._halves[word], seen & 0xFFFFFFFF, min(timeout_s, LOOK_UP_S))


class Heartbeat:
    """A thread that writes the time into one word, several times per heartbeat deadline, until stopped."""

    def __init__(self, control: ControlPage, word: Word, deadline_s: float) -> None:
        self._stop = threading.Event()
        control.set(word, time.monotonic_ns())
        self._thread = threading.Thread(
            target=_beat,
            args=(control, word, deadline_s / HEARTBEATS_PER_DEADLINE, self._stop),
            name=f"channel-{word.name.lower()}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """No beat is written after this returns. Idempotent."""
        self._stop.set()
        self._thread.join()


def _beat(control: ControlPage, word: Word, interval_s: float, stop: threading.Event) -> None:
    while not stop.wait(interval_s):
        control.set(word, time.monotonic_ns())


def _hash(channel_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(channel_id.encode(), digest_size=8).digest(), "little")
