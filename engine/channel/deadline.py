"""How much of a wait's time is left?"""

from __future__ import annotations

import time


class Deadline:
    """A point in time `after_s` seconds from now."""

    __slots__ = ("_end",)

    def __init__(self, after_s: float) -> None:
        self._end = time.monotonic() + after_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether none are left."""
        return time.monotonic() >= self._end
