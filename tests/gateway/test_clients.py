"""Does a stream to a service end when it should, and say why?"""

from __future__ import annotations

import asyncio

import pytest

from gateway.clients import StreamLost, TargetStream
from gateway.messages import StepPlan, TargetEvent, TargetInfo
from tests.gateway.fake_target import FakeTarget
from tests.gateway.stack_of_fakes import eventually


async def talk(target: FakeTarget, max_queued: int = 16) -> tuple[TargetStream, asyncio.Task[str], list[TargetEvent]]:
    """A stream whose hello has been answered."""
    events: list[TargetEvent] = []
    stream = TargetStream(target.address, events.append, max_queued)
    task = asyncio.create_task(stream.converse("test"))
    await eventually(lambda: bool(events))
    assert isinstance(events[0], TargetInfo)
    return stream, task, events


async def test_it_says_why_it_ended(free_port: int) -> None:
    target = FakeTarget(free_port)
    await target.start()
    try:
        stream, task, _ = await talk(target)
        stream.close("enough")
        assert await asyncio.wait_for(task, 5) == "enough"
        with pytest.raises(StreamLost, match="enough"):
            stream.release("r", 1)

        stream, task, _ = await talk(target)
        await target.kill()
        assert await asyncio.wait_for(task, 5)
        assert stream.broken
    finally:
        await target.kill()


async def test_services_are_not_looked_for_behind_a_proxy(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    target = FakeTarget(free_port)
    await target.start()
    try:
        stream, task, _ = await talk(target)
        stream.close("enough")
        await asyncio.wait_for(task, 5)
    finally:
        await target.kill()


async def test_a_cancelled_conversation_is_cancelled_even_when_it_is_closed_at_the_same_time(free_port: int) -> None:
    """Or its owner, told to stop, would go on and connect again."""
    target = FakeTarget(free_port)
    await target.start()
    try:
        stream, task, _ = await talk(target)
        stream.close("enough")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
    finally:
        await target.kill()


async def test_a_service_that_does_not_read_is_given_up(free_port: int) -> None:
    target = FakeTarget(free_port)
    await target.start()
    try:
        stream, task, _ = await talk(target)
        for seq in range(1, 17):
            stream.plan(StepPlan(seq, "", 0, (), 0, 10))
        with pytest.raises(StreamLost, match="stopped reading"):
            stream.plan(StepPlan(17, "", 0, (), 0, 10))
        assert "stopped reading" in await asyncio.wait_for(task, 5)
    finally:
        await target.kill()


async def test_a_handler_that_fails_ends_the_stream_not_the_owner(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = FakeTarget(free_port)
    await target.start()

    def handler(event: TargetEvent) -> None:
        raise RuntimeError("a fault of the gateway's own")

    try:
        stream = TargetStream(target.address, handler, 16)
        assert "failed to handle" in await asyncio.wait_for(stream.converse("test"), 5)
        assert "a fault of the gateway's own" in caplog.text
    finally:
        await target.kill()
