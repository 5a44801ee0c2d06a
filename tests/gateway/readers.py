"""Clients that read side by side, each with a prompt of its own, while something happens to the services."""

from __future__ import annotations

import asyncio

from tests.gateway.stack_of_fakes import Stack, generation
from tests.gateway.toy import continuation


async def start(stack: Stack, num_clients: int, max_tokens: int, num_before: int = 2) -> list[asyncio.Task[list[int]]]:
    """Clients that read to the end, each with a prompt of its own; returns once each has had `num_before` deltas."""
    begun = [asyncio.Event() for _ in range(num_clients)]

    async def client(number: int) -> list[int]:
        stream = await stack.dispatcher.submit(generation((number + 1, 2, 3), max_tokens))
        tokens: list[int] = []
        num_deltas = 0
        async for delta in stream:
            tokens += delta.token_ids
            num_deltas += 1
            if num_deltas == num_before:
                begun[number].set()
        return tokens

    tasks = [asyncio.create_task(client(number)) for number in range(num_clients)]
    async with asyncio.timeout(10):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def check(tasks: list[asyncio.Task[list[int]]], max_tokens: int) -> None:
    """Every client got exactly its own continuation."""
    async with asyncio.timeout(30):
        for number, tokens in enumerate(await asyncio.gather(*tasks)):
            assert tokens == continuation((number + 1, 2, 3), max_tokens)
