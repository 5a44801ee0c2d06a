"""What the fakes of a target and a drafter have in common: a gRPC server that can be killed, and the channel.

Real gRPC servers in this process, speaking outrider.v1 the way the services do. What a gateway must never do is written
to `violations`. The channel between the two is a plain object. Faults are scripted from outside: kill, start (a new
instance), hang.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import grpc
import grpc.aio

_instances = itertools.count(1)


@dataclass
class Channel:
    """What the two fakes share. ring, replies: by seq. ring: how many tokens a row's request had, then its new ones."""

    channel_id: str
    epoch: int
    ring: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    replies: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    closed: bool = False

    async def put(self, where: dict[int, dict[str, list[int]]], seq: int, entry: dict[str, list[int]]) -> None:
        async with self.changed:
            where[seq] = entry
            where.pop(seq - 8, None)
            self.changed.notify_all()

    async def take(
        self, where: dict[int, dict[str, list[int]]], seq: int, deadline_s: float
    ) -> dict[str, list[int]] | None:
        try:
            async with asyncio.timeout(deadline_s), self.changed:
                await self.changed.wait_for(lambda: self.closed or max(where, default=0) >= seq)
        except TimeoutError:
            return None
        return where.get(seq)

    async def close(self) -> None:
        async with self.changed:
            self.closed = True
            self.changed.notify_all()


class FakeServer:
    """Start, stop and restart of a gRPC server on one reserved port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.instance_id = ""
        self.violations: list[str] = []
        self.go = asyncio.Event()  # cleared: hangs at the next step
        self.go.set()
        self._server: grpc.aio.Server | None = None

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.reset()
        self.instance_id = f"instance-{next(_instances)}"
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.register(self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        """Every connection breaks; everything is forgotten."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
            self.reset()
