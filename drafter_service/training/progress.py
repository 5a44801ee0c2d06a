"""How does a long run show where it is?

A bar on a terminal; elsewhere one line every few seconds, so that a log stays readable. Everything goes to stderr.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class PhaseProgress:
    """Progress of one phase, as a fraction and a few words. A context manager."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<9}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"),
                console=console,
            )

    def __enter__(self) -> PhaseProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._phase, total=1.0, words="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, fraction: float, words: str) -> None:
        """fraction: 0..1 done. words: what is worth knowing, short."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=min(1.0, fraction), words=words)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self.line(f"{min(1.0, fraction):4.0%}  {words}")

    def line(self, text: str) -> None:
        """One line that stays."""
        if self._bar is not None:
            self._bar.console.print(f"{self._phase}: {text}", highlight=False)
        else:
            print(f"{self._phase}: {text}", file=sys.stderr, flush=True)
