"""Which seat does a request sit on?

A seat is a request's fixed index in per-request device state, for as long as it is resident. The lowest free seat is
handed out, so that a lightly loaded service touches few rows of that state.
"""

from __future__ import annotations

import heapq

from engine.errors import IntegrityError


class SeatAllocator:
    """Owner of the seats 0 .. num_seats - 1. Used by one thread."""

    def __init__(self, num_seats: int) -> None:
        if num_seats < 1:
            raise ValueError(f"num_seats must be at least 1, got {num_seats}")
        self.num_seats = num_seats
        self._free = list(range(num_seats))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """The lowest free seat, or None when all are taken."""
        if not self._free:
            return None
        seat = heapq.heappop(self._free)
        self._taken.add(seat)
        return seat

    def release(self, seat: int) -> None:
        """Give a seat back. IntegrityError when it is not taken."""
        if seat not in self._taken:
            raise IntegrityError(f"seat {seat} is not taken")
        self._taken.remove(seat)
        heapq.heappush(self._free, seat)
