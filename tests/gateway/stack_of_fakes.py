"""What a test holds of a gateway over fakes, and the small things every test does with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.dispatcher import Dispatcher
from gateway.generation import Delta, Generation, SamplingOptions
from gateway.requests import DeltaStream
from tests.gateway.fake_drafter import FakeDrafter
from tests.gateway.fake_target import FakeTarget

GREEDY = SamplingOptions(temperature=0.0)
_ids = itertools.count(1)


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; fails when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for knows nothing of events)
            await asyncio.sleep(0.002)


def generation(prompt: Sequence[int] = (1, 2, 3), max_tokens: int | None = 20, **other: Any) -> Generation:
    """A greedy generation with an id of its own that does not end by itself."""
    other.setdefault("sampling", GREEDY)
    other.setdefault("ignore_eos", True)
    return Generation(f"r{next(_ids)}", tuple(prompt), max_tokens, **other)


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    """All token ids, in order."""
    return [token for delta in deltas for token in delta.token_ids]


async def read(stream: DeltaStream) -> list[Delta]:
    """All deltas of a stream."""
    return [delta async for delta in stream]


@dataclass
class Stack:
    """A dispatcher, and the fakes behind it."""

    target: FakeTarget
    drafter: FakeDrafter
    dispatcher: Dispatcher
    registry: CollectorRegistry

    async def run(self, wanted: Generation) -> list[Delta]:
        """Submit and read to the end."""
        return await read(await self.dispatcher.submit(wanted))

    def service(self, role: str) -> str:
        """The state of a service as the gateway tells it."""
        return next(service.state for service in self.dispatcher.status().services if service.role == role)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the gateway's registry; 0 where there is none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident anywhere."""
        return not self.target.resident and not self.drafter.state

    async def until_empty(self) -> None:
        """Wait until nothing is."""
        await eventually(lambda: self.is_empty)
