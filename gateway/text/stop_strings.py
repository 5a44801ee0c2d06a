"""Has one of the stop strings come, and which text may be shown before that is known?

The first stop string to be complete ends the text; of two that end at the same character, the longer one. That
depends on the characters alone, never on how they arrive in pieces, so drafts cannot change where a text stops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """text: may be shown now. stopped: the stop string that came, or None; `text` then ends right before it."""

    text: str
    stopped: str | None


class StopMatcher:
    """One text's matcher. Holds back the longest end of the text that may still become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        if any(not string for string in stop):
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> StopStep:
        """Take the next piece. After a stop string came, nothing more may be pushed."""
        if not self._stop:
            return StopStep(text, None)
        text = self._held + text
        self._held = ""
        matches = [(start + len(string), start, string) for string in self._stop if (start := text.find(string)) >= 0]
        if matches:
            _, start, string = min(matches)
            return StopStep(text[:start], string)
        held = self._held_len(text)
        self._held = text[len(text) - held :]
        return StopStep(text[: len(text) - held], None)

    def flush(self) -> str:
        """The text is over: what was held back is text after all."""
        text, self._held = self._held, ""
        return text

    def _held_len(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._stop):
                return length
        return 0
