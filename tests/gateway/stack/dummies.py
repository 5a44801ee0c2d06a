"""Specs of dummy services, and what a supervisor said about them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.stack.settings import ServiceSpec
from gateway.supervisor import ServiceState

DUMMY = Path(__file__).with_name("dummy_service.py")


def spec(name: str, address: str, *arguments: str) -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, str(DUMMY), address, *arguments), {"PYTHONUNBUFFERED": "1"}, address)


@dataclass
class Seen:
    """Collects lines and states; `until` waits for something among them."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    states: list[tuple[str, ServiceState]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    def on_state(self, name: str, state: ServiceState, _detail: str) -> None:
        self.states.append((name, state))
        self._changed.set()

    async def until(self, holds: Callable[[], bool], deadline_s: float = 20) -> None:
        async with asyncio.timeout(deadline_s):
            while not holds():
                self._changed.clear()
                await self._changed.wait()
