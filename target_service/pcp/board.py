"""Through what do ranks hear of a step, and see that the others live?

One shared memory object that rank 0 makes: words, one cache line each, every word with a single writer, and
a ring of orders. Rank 0 writes an order and moves a counter; the others sleep on it (engine/channel/futex.py says
in which order things are seen), copy the order, and say that they have. A heartbeat per rank shows a process that
hangs; `closed` sends everybody home.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, TypeVar

from engine.channel.futex import Futex
from engine.channel.memory import ExportedMemory, attach_memory
from engine.errors import RanksLost
from target_service.pcp.order import LaunchOrder, StepOrder

_MAGIC = 0x31_50_43_50_54_55_4F  # "OUTPCP1"
_WORD_STRIDE = 64
_TAG = struct.Struct("<q")  # before each order: its step
LOOK_UP_S = 0.05  # the longest a waiter goes without looking whether it is all over


OrderT = TypeVar("OrderT")


class Order(Protocol):
    """What can be put on the board."""

    def encode_into(self, buffer: memoryview) -> int: ...


class RankState(IntEnum):
    """How far a rank is; each sets its own."""

    STARTING = 0
    LOADED = 1
    JOINED = 2


class _Word(IntEnum):
    MAGIC = 0
    ORDER_SEQ = 1
    JOINING = 2
    CLOSED = 3
    FIRST_RANK = 4


class _RankWord(IntEnum):
    BEAT_NS = 0
    STATE = 1
    TAKEN_SEQ = 2


class Board:
    """One rank's view of the board. Holds the mapping alive; heartbeats may be written by another thread.

    order_bytes: of the largest order. depth: how many orders it holds; with as many steps under way at most, nobody
    waits for a place. The same for all ranks.
    """

    def __init__(self, buffer: mmap.mmap, num_ranks: int, order_bytes: int, depth: int = 2) -> None:
        self.num_ranks = num_ranks
        self._depth = depth
        self._order_bytes = order_bytes
        self._futex = Futex()
        num_words = _Word.FIRST_RANK + num_ranks * len(_RankWord)
        offsets = [index * _WORD_STRIDE for index in range(num_words)]
        self._words = [ctypes.c_uint64.from_buffer(buffer, offset) for offset in offsets]
        self._halves = [ctypes.c_uint32.from_buffer(buffer, offset) for offset in offsets]
        self._entries = memoryview(buffer)[num_words * _WORD_STRIDE :]

    @staticmethod
    def num_bytes(num_ranks: int, order_bytes: int, depth: int = 2) -> int:
        """How large the object is."""
        return (_Word.FIRST_RANK + num_ranks * len(_RankWord)) * _WORD_STRIDE + depth * _aligned(
            _TAG.size + order_bytes
        )

    @classmethod
    def attach(cls, name: str, num_ranks: int, order_bytes: int, depth: int = 2) -> Board:
        """Map rank 0's board. ChannelError when it is not there or of another size."""
        memory = attach_memory(name, cls.num_bytes(num_ranks, order_bytes, depth))
        board = cls(memory, num_ranks, order_bytes, depth)
        if board._get(_Word.MAGIC) != _MAGIC:
            raise RanksLost(f"{name} is not a board")
        return board

    def publish(self, order: Order, seq: int, deadline_s: float, lost: Callable[[], bool]) -> None:
        """Rank 0: tell the others of step `seq` (1, 2, ...). Waits while they have not taken the order in its place.

        RanksLost when they do not within deadline_s, or `lost()` is true.
        """
        end = time.monotonic() + deadline_s
        for rank in range(1, self.num_ranks):
            while not self.taken(rank, seq - self._depth, end - time.monotonic()):
                if lost() or time.monotonic() >= end:
                    raise RanksLost(f"rank {rank} did not take step {seq - self._depth}")
        entry = self._entry(seq)
        order.encode_into(entry[_TAG.size :])
        _TAG.pack_into(entry, 0, seq)
        self._advance(_Word.ORDER_SEQ, seq)

    def take(self, rank: int, seq: int, timeout_s: float) -> StepOrder | None:
        """A rank: the order of step `seq`, None when it does not come within timeout_s or the board is closed first.

        RanksLost when another step's is found in its place: this rank is out of step.
        """
        return self._take(rank, seq, timeout_s, StepOrder.decode)

    def take_launch(self, rank: int, seq: int, timeout_s: float) -> LaunchOrder | None:
        """`take` where orders are LaunchOrders."""
        return self._take(rank, seq, timeout_s, LaunchOrder.decode)

    def _take(self, rank: int, seq: int, timeout_s: float, decode: Callable[[memoryview], OrderT]) -> OrderT | None:
        end = time.monotonic() + timeout_s
        while (found := self._get(_Word.ORDER_SEQ)) < seq:
            left = end - time.monotonic()
            if left <= 0 or self.closed:
                return None
            self._sleep(_Word.ORDER_SEQ, found, left)
        self._futex.fence()
        entry = self._entry(seq)
        (tag,) = _TAG.unpack_from(entry, 0)
        if tag != seq:
            raise RanksLost(f"rank {rank} is at step {seq} and finds the order of step {tag}")
        order = decode(entry[_TAG.size :])
        self._advance(_rank_word(rank, _RankWord.TAKEN_SEQ), seq)
        return order

    def taken(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Whether a rank has taken the order of step `seq`, looked at once or twice and for `timeout_s` at most."""
        word = _rank_word(rank, _RankWord.TAKEN_SEQ)
        if (found := self._get(word)) < seq:
            self._sleep(word, found, timeout_s)
        return self._get(word) >= seq

    def beat(self, rank: int) -> None:
        """This rank lives."""
        self._set(_rank_word(rank, _RankWord.BEAT_NS), time.monotonic_ns())

    def last_beat_s(self, rank: int) -> float:
        """When it last said so, on time.monotonic's clock; 0.0: never yet."""
        return self._get(_rank_word(rank, _RankWord.BEAT_NS)) / 1e9

    def set_state(self, rank: int, state: RankState) -> None:
        """By the rank itself."""
        self._advance(_rank_word(rank, _RankWord.STATE), state)

    def wait_all(self, state: RankState, timeout_s: float) -> bool:
        """Whether all ranks but 0 are at least that far, looked at for `timeout_s` at most."""
        end = time.monotonic() + timeout_s
        for rank in range(1, self.num_ranks):
            word = _rank_word(rank, _RankWord.STATE)
            while (found := self._get(word)) < state:
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._sleep(word, found, left)
        return True

    def start_joining(self) -> None:
        """Rank 0: everybody has loaded, the group is made now."""
        self._advance(_Word.JOINING, 1)

    def wait_joining(self, timeout_s: float) -> bool:
        """Whether `start_joining` was called, looked at for `timeout_s` at most."""
        end = time.monotonic() + timeout_s
        while not self._get(_Word.JOINING):
            if (left := end - time.monotonic()) <= 0 or self.closed:
                return False
            self._sleep(_Word.JOINING, 0, left)
        return True

    def close(self) -> None:
        """Rank 0: no order comes any more."""
        self._advance(_Word.CLOSED, 1)
        for word in (_Word.ORDER_SEQ, _Word.JOINING):
            self._futex.wake(self._halves[word])

    @property
    def closed(self) -> bool:
        """Whether rank 0 has closed it."""
        return self._get(_Word.CLOSED) != 0

    def format(self) -> None:
        """Rank 0: make a zeroed object a board."""
        self._advance(_Word.MAGIC, _MAGIC)

    def _entry(self, seq: int) -> memoryview:
        num_bytes = _aligned(_TAG.size + self._order_bytes)
        start = seq % self._depth * num_bytes
        return self._entries[start : start + num_bytes]

    def _get(self, word: int) -> int:
        value: int = self._words[word].value
        return value

    def _set(self, word: int, value: int) -> None:
        self._words[word].value = value

    def _advance(self, word: int, value: int) -> None:
        self._futex.fence()
        self._set(word, value)
        self._futex.wake(self._halves[word])

    def _sleep(self, word: int, seen: int, timeout_s: float) -> None:
        self._futex.wait(self._halves[word], seen & 0xFFFFFFFF, min(timeout_s, LOOK_UP_S))


class ExportedBoard:
    """Rank 0's board and the memory that it owns."""

    def __init__(self, num_ranks: int, order_bytes: int, depth: int = 2) -> None:
        """ChannelError when /dev/shm has no room for it."""
        self.order_bytes = order_bytes
        self.depth = depth
        self._memory = ExportedMemory(Board.num_bytes(num_ranks, order_bytes, depth))
        self.board = Board(self._memory.buffer, num_ranks, order_bytes, depth)
        self.board.format()

    @property
    def name(self) -> str:
        """What the other ranks attach it by."""
        return self._memory.name

    def close(self) -> None:
        """Close the board and free its memory. Idempotent."""
        self.board.close()
        self._memory.close()


def _rank_word(rank: int, word: _RankWord) -> int:
    return _Word.FIRST_RANK + rank * len(_RankWord) + word


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_STRIDE) * _WORD_STRIDE
