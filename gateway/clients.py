"""How does the gateway hold a long conversation with a service?

One bidirectional stream per service, for as long as it lasts: commands go out through a bounded queue drained by one
writer, events come in through one reader and are handed on as values, synchronously. No task is made per command or
per event. A stream that breaks, for whatever reason, is reported once and never used again; connecting anew is the
caller's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from gateway.codec import (
    drafter_event_value,
    fill_plan,
    placement_message,
    target_event_value,
)
from gateway.messages import BadEvent, DrafterEvent, Placement, StepPlan, TargetEvent
from protos import common_pb2, drafter_pb2, drafter_pb2_grpc, target_pb2, target_pb2_grpc

_log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    # A pool of its own: the shared one remembers the back-off of a dead server's address, and a restarted service
    # would be noticed only when that has passed.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy in the environment is for the world outside, not for the services of one deployment.
    ("grpc.enable_http_proxy", 0),
    # Within one attempt: a service that comes up is found in a moment, not after gRPC's own second and more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A host that vanished without a word is noticed while nothing is sent; both services allow pings this often.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
)
CONNECT_TIMEOUT_S = 5.0

EventT = TypeVar("EventT")


class StreamLost(Exception):
    """The stream cannot carry commands any more; says why."""


class ServiceStream(Generic[EventT]):
    """The part of a stream that is the same for both services.

    `on_event` is called with every event in order, never re-entrantly; an exception from it breaks the stream, so that
    a fault of the gateway's own is recovered from as a lost service is. `run` is awaited by the owner and returns when
    it is over.
    """

    def __init__(
        self,
        address: str,
        open_call: Callable[[grpc.aio.Channel], Any],
        decode: Callable[[Any], EventT],
        on_event: Callable[[EventT], None],
        max_queued: int,
    ) -> None:
        self.address = address
        self._open_call = open_call
        self._decode = decode
        self._on_event = on_event
        self._max_queued = max_queued
        self._queue: deque[Any] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._call: Any = None
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """Why the stream is over, or None while it lasts."""
        return self._broken

    def _send(self, command: Any) -> None:
        """Queue one command. Raises StreamLost when the stream is over or the service has stopped taking commands."""
        if self._broken is not None:
            raise StreamLost(self._broken)
        if len(self._queue) >= self._max_queued:
            self.close(f"{len(self._queue)} commands wait to be sent: the service has stopped reading")
            raise StreamLost(self._broken or "")
        self._queue.append(command)
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self, reason: str) -> None:
        """End the stream; `run` returns soon after. Idempotent: the first reason stays."""
        if self._broken is None:
            self._broken = reason
            if self._call is not None:
                self._call.cancel()
            self._rouse()

    async def run(self, greeting: Any) -> str:
        """Connect, send `greeting`, then carry commands and events until the stream ends. Returns why it ended."""
        channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await channel.channel_ready()
            if self._broken is None:
                self._call = self._open_call(channel)
                self._queue.appendleft(greeting)
                writer = asyncio.create_task(self._write())
                await self._read()
        except TimeoutError:
            self.close(f"no connection within {CONNECT_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            self.close(f"{error.code().name}: {error.details()}")
        except BadEvent as error:
            _log.error("%s broke the protocol: %s", self.address, error)
            self.close(f"it broke the protocol: {error}")
        finally:
            self.close("closed")
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await channel.close(None)
        return self._broken or ""

    async def _read(self) -> None:
        call, decode, on_event = self._call, self._decode, self._on_event
        while True:
            try:
                message = await call.read()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._broken is None or (task is not None and task.cancelling()):
                    raise
                return  # it is the call that `close` has cancelled, not this task
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs do not have it
                status = await call.code()
                self.close(f"the service ended the stream ({status.name}: {await call.details()})")
                return
            event = decode(message)
            try:
                on_event(event)
            except BadEvent:
                raise
            except Exception:  # a fault of ours must not end the loop that recovers from lost streams
                _log.exception("failed to handle an event of %s", self.address)
                self.close("the gateway failed to handle an event")
                return

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        queue, call = self._queue, self._call
        try:
            while self._broken is None:
                while queue:
                    await call.write(queue.popleft())
                self._wake = loop.create_future()
                await self._wake
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader sees the stream's end too, with its status; this is only for a write that meets it first.
            detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self.close(f"a command could not be sent: {detail}")


class TargetStream(ServiceStream[TargetEvent]):
    """The stream to a target."""

    def __init__(self, address: str, on_event: Callable[[TargetEvent], None], max_queued: int) -> None:
        super().__init__(
            address,
            lambda channel: target_pb2_grpc.TargetServiceStub(channel).Serve(),
            target_event_value,
            on_event,
            max_queued,
        )

    async def converse(self, gateway_id: str) -> str:
        """Say hello and stay until the stream ends; returns why it did."""
        return await self.run(target_pb2.TargetCommand(hello=target_pb2.TargetHello(gateway_id=gateway_id)))

    def admit(self, placement: Placement) -> None:
        """Place a request. Raises StreamLost, as do the others."""
        self._send(target_pb2.TargetCommand(admit=placement_message(placement)))

    def release(self, request_id: str, epoch: int) -> None:
        """Give up a placement."""
        self._send(target_pb2.TargetCommand(release=common_pb2.Release(request_id=request_id, epoch=epoch)))

    def plan(self, plan: StepPlan) -> None:
        """Run a step."""
        command = target_pb2.TargetCommand()
        fill_plan(command.plan, plan)
        self._send(command)


class DrafterStream(ServiceStream[DrafterEvent]):
    """The stream to a drafter."""

    def __init__(self, address: str, on_event: Callable[[DrafterEvent], None], max_queued: int) -> None:
        super().__init__(
            address,
            lambda channel: drafter_pb2_grpc.DrafterServiceStub(channel).Serve(),
            drafter_event_value,
            on_event,
            max_queued,
        )

    async def converse(self, gateway_id: str) -> str:
        """Say hello and stay until the stream ends; returns why it did."""
        return await self.run(drafter_pb2.DrafterCommand(hello=drafter_pb2.DrafterHello(gateway_id=gateway_id)))

    def open_channel(self, target_address: str) -> None:
        """Attach to a target, anew where it was attached before. Raises StreamLost, as do the others."""
        self._send(drafter_pb2.DrafterCommand(open=drafter_pb2.OpenChannel(target_address=target_address)))

    def admit(self, placement: Placement) -> None:
        """Place a request."""
        self._send(drafter_pb2.DrafterCommand(admit=placement_message(placement)))

    def release(self, request_id: str, epoch: int) -> None:
        """Give up a placement."""
        self._send(drafter_pb2.DrafterCommand(release=common_pb2.Release(request_id=request_id, epoch=epoch)))

    def plan(self, plan: StepPlan) -> None:
        """Draft after a step."""
        command = drafter_pb2.DrafterCommand()
        fill_plan(command.plan, plan)
        self._send(command)
