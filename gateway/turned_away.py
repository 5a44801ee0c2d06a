"""When may a client that is turned away, because the queue is full, come back?

Places in the queue come free one by one, each time that a running request ends: with n running, one every n-th of the
time that a request runs. How long it waited before it ran does not count. Who is turned away is told the next place
that nobody was told of before, so that not all come back for the same one; at the latest the time by which all who wait
now have been started, since not everybody comes back.
"""

from __future__ import annotations

SHORTEST_S = 1.0
LONGEST_S = 60.0
FIRST_GUESS_S = 1.0  # until a request has ended
WEIGHT = 0.1  # of one more request in the mean


class TurnedAway:
    """What one target's queue tells them. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._run_s: float | None = None
        self._told_until = 0.0

    def ended(self, run_s: float) -> None:
        """A request that ran has ended, however, run_s after its start."""
        self._run_s = run_s if self._run_s is None else self._run_s + WEIGHT * (run_s - self._run_s)

    def come_back_s(self, num_running: int, num_waiting: int, now: float) -> float:
        """For one more client, in seconds."""
        place_s = (FIRST_GUESS_S if self._run_s is None else self._run_s) / max(1, num_running)
        last = now + place_s * (num_waiting + 1)
        self._told_until = min(max(now, self._told_until) + place_s, last)
        return min(max(self._told_until - now, SHORTEST_S), LONGEST_S)
