"""What does a person at the terminal see of the services: their logs, their progress, an answer as it grows?"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gateway.supervisor import ServiceState

COLOURS = {"target": "cyan", "drafter": "magenta", "gateway": "blue"}
DRAFTED = "green"
NAME_WIDTH = 7
LOG_HEAD = re.compile(r"^[-\d]+ [:,.\d]+ [A-Z]+ ")  # when and how grave: no room for it beside a spinner


class LogPrinter:
    """Prints the services' lines, each behind its service's name."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, name: str, line: str) -> None:
        """Print one line. Colours of its own stay; no markup is read in it, and it is not wrapped."""
        prefix = (f"{name:>{NAME_WIDTH}} │ ", COLOURS.get(name, "yellow"))
        self._console.print(Text.assemble(prefix, Text.from_ansi(line)), soft_wrap=True, highlight=False)


class LogFiles:
    """Keeps the services' lines in `directory`, a file for each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, name: str, line: str) -> None:
        """Append one line."""
        with (self._directory / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


class StartView:
    """Who is ready and who is not, while the services start. `with` it.

    On a terminal a line for each service that changes in place; elsewhere a line whenever one becomes ready.
    """

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console = console
        self._began = time.monotonic()
        self._rows = {name: _Row(name) for name in names}
        self._live = Live(self, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> StartView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(*self._lines(), sep="\n")

    def on_line(self, name: str, line: str) -> None:
        """What a service says last is shown beside it."""
        if line.strip():
            self._rows[name].said = LOG_HEAD.sub("", Text.from_ansi(line).plain)

    def on_state(self, name: str, state: ServiceState, detail: str) -> None:
        """Take note of a change of state."""
        row = self._rows[name]
        row.state, row.detail = state, detail
        if state is ServiceState.READY and row.ready_s is None:
            row.ready_s = time.monotonic() - self._began
            if not self._console.is_terminal:
                self._console.print(row.line())

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 1, 0, 0))
        for row in self._rows.values():
            waiting = row.ready_s is None
            elapsed = time.monotonic() - self._began
            said = Text(row.said, style="dim", overflow="ellipsis", no_wrap=True)
            table.add_row(
                " ",
                row.spinner if waiting else Text("✓", style="green"),
                Text(row.name, style=COLOURS.get(row.name, "yellow")),
                Text(f"{elapsed if row.ready_s is None else row.ready_s:5.1f} s"),
                said if waiting else Text("ready"),
            )
        yield table

    def _lines(self) -> list[Text]:
        return [row.line() for row in self._rows.values() if row.ready_s is not None]


class _Row:
    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ServiceState.STARTING
        self.detail = ""
        self.said = ""
        self.ready_s: float | None = None
        self.spinner = Spinner("dots")

    def line(self) -> Text:
        return Text.assemble(
            ("  ✓ ", "green"),
            (f"{self.name:<{NAME_WIDTH}}", COLOURS.get(self.name, "yellow")),
            f" ready after {self.ready_s or 0:.1f} s",
        )


def print_span(console: Console, text: str, from_draft: bool) -> None:
    """Print the next piece of an answer; accepted drafts stand out."""
    console.print(Text(text, style=DRAFTED if from_draft else ""), end="", soft_wrap=True, highlight=False)


def legend() -> Text:
    """What the colours of an answer mean."""
    return Text.assemble(("drafted and accepted", DRAFTED), ("  ·  ", "dim"), "the target's own")
