"""How do the generations of one HTTP request run side by side, and end together?

One request asks for `n` choices of one or several prompts; each is a generation of its own. Their deltas come out of
one iterator, in the order of their commits. Whatever ends that iterator (its end, an error of one generation, a
client that leaves) closes all of them, which frees their seats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from gateway.generation import Delta, Generation

QUEUED_EVENTS = 64  # between the generations and a slow client; they wait when it is full


class DeltaSource(Protocol):
    """One generation's deltas; closing it, or cancelling the task that waits on it, cancels the generation."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self) -> None: ...


class Submitter(Protocol):
    """What this package needs of the dispatcher."""

    async def submit(self, generation: Generation) -> DeltaSource:
        """Start a generation. Raises GatewayError, here or while iterating."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """A delta of choice `choice`."""

    choice: int
    delta: Delta


async def run_generations(dispatcher: Submitter, generations: Sequence[Generation]) -> AsyncGenerator[Event, None]:
    """All generations' deltas; choice i is generations[i]. Raises the first GatewayError of any of them."""
    async with AsyncExitStack() as stack:
        sources: list[DeltaSource] = []
        for generation in generations:
            source = await dispatcher.submit(generation)
            stack.push_async_callback(source.aclose)
            sources.append(source)
        if len(sources) == 1:
            async for delta in sources[0]:
                yield Event(0, delta)
            return
        queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(QUEUED_EVENTS)
        pumps = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
        stack.push_async_callback(_end, pumps)
        running = len(pumps)
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry


async def _pump(index: int, source: DeltaSource, queue: asyncio.Queue[Event | Exception | None]) -> None:
    try:
        async for delta in source:
            await queue.put(Event(index, delta))
    except Exception as error:  # handed to whoever iterates: this task is nobody's to await until then
        await queue.put(error)
    else:
        await queue.put(None)


async def _end(pumps: Sequence[asyncio.Task[None]]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
