"""Over a real socket: the official client, Unicode in events, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import ClassVar

import httpx
import openai
import pytest
import uvicorn
import uvloop
from starlette.types import Message

from gateway.errors import InvalidGeneration, QueueFull, TargetUnavailable
from gateway.rest.connections import DeadlineProtocol
from gateway.rest.sse import EventStream
from tests.gateway.rest import fakes
from tests.gateway.text import tiny_tokenizers


class _Hurried(DeadlineProtocol):
    head_deadline_s = 0.3
    take_deadline_s = 0.3


@contextlib.asynccontextmanager
async def serving(dispatcher: fakes.FakeDispatcher) -> AsyncIterator[str]:
    """The application on a port of its own; yields its URL."""
    config = uvicorn.Config(
        fakes.make_app(dispatcher), http=_Hurried, log_level="warning", lifespan="off", ws="none", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)


@pytest.fixture
async def url(dispatcher: fakes.FakeDispatcher) -> AsyncIterator[str]:
    async with serving(dispatcher) as url:
        yield url


@pytest.fixture
async def official(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def test_official_client_chat(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model=fakes.MODEL,
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        top_logprobs=1,
        n=2,
        extra_body={"draft_len": 3},
    )
    assert [choice.message.content for choice in answer.choices] == [fakes.ANSWER] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content


async def test_official_client_streams(official: openai.AsyncOpenAI, dispatcher: fakes.FakeDispatcher) -> None:
    stream = await official.chat.completions.create(
        model=fakes.MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == fakes.ANSWER
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-1].usage is not None
    extension = chunks[0].choices[0].model_extra
    assert extension is not None
    assert extension["outrider"]["from_draft"] == [False]
    parts = [
        part.choices[0].text
        async for part in await official.completions.create(model=fakes.MODEL, prompt="a", max_tokens=50, stream=True)
    ]
    assert "".join(parts) == fakes.ANSWER
    assert not dispatcher.open


async def test_official_client_understands_the_errors(
    official: openai.AsyncOpenAI, dispatcher: fakes.FakeDispatcher
) -> None:
    async def ask(model: str = fakes.MODEL, stream: bool = False) -> None:
        answer = await official.completions.create(model=model, prompt="a", stream=stream)
        if isinstance(answer, openai.AsyncStream):
            async for _ in answer:
                pass

    with pytest.raises(openai.NotFoundError) as missing:
        await ask("other")
    assert missing.value.param == "model"
    dispatcher.error = InvalidGeneration("max_tokens", "no")
    with pytest.raises(openai.BadRequestError) as bad:
        await ask()
    assert bad.value.param == "max_tokens"
    dispatcher.error = QueueFull(1)
    with pytest.raises(openai.RateLimitError):
        await ask(stream=True)
    dispatcher.error, dispatcher.fails_after = TargetUnavailable("away"), 1
    with pytest.raises(openai.APIError, match="away"):
        await ask(stream=True)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_cancels_its_generations(streamed: bool, n: int) -> None:
    dispatcher = fakes.FakeDispatcher(tiny_tokenizers.byte_level(), never_ends=True)
    async with serving(dispatcher) as url, httpx.AsyncClient() as http:
        body = {"prompt": "a", "max_tokens": 50, "stream": streamed, "n": n}
        if streamed:
            async with http.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as answer:
                await anext(answer.aiter_lines())
                assert len(dispatcher.open) == n
        else:
            task = asyncio.create_task(http.post(f"{url}/v1/completions", json=body, timeout=30))
            await dispatcher.wait_open(n)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await dispatcher.wait_open(0)
        pumps = [task for task in asyncio.all_tasks() if "_pump" in repr(task.get_coro())]
        assert pumps == []


async def test_a_client_that_leaves_before_the_first_token(dispatcher: fakes.FakeDispatcher) -> None:
    dispatcher.never_ends, dispatcher.commit_len = True, 1
    entered = asyncio.Event()

    async def hang(generation: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    dispatcher.submit = hang  # type: ignore[method-assign, assignment]
    async with serving(dispatcher) as url, httpx.AsyncClient() as http:
        task = asyncio.create_task(http.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}))
        await asyncio.wait_for(entered.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    # `serving` ends only when no request is left behind


async def test_a_fault_of_ours_is_a_500_without_details(dispatcher: fakes.FakeDispatcher) -> None:
    async def broken(generation: object) -> None:
        raise RuntimeError("secret")

    dispatcher.submit = broken  # type: ignore[method-assign, assignment]
    async with serving(dispatcher) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in answer.text


async def test_a_client_that_leaves_before_the_stream_begins_closes_what_it_reads_from() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never"

    async def close() -> None:
        closed.set()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        await asyncio.Event().wait()  # a server that cannot even send the status line

    await asyncio.wait_for(EventStream(events(), close)({"type": "http"}, receive, send), 5)
    assert closed.is_set()


async def test_a_body_that_does_not_come_is_not_waited_for(url: str) -> None:
    async def body() -> AsyncGenerator[bytes, None]:
        yield b'{"prompt": '
        await asyncio.sleep(20)

    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(f"{url}/v1/completions", content=body())
    assert answer.status_code == 408
    assert answer.json()["error"]["param"] == "body"


async def test_a_client_that_leaves_in_its_own_request_is_no_fault_of_ours(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    async with httpx.AsyncClient(timeout=10) as http:
        assert (await http.get(f"{url}/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


WHOLE_HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHo", WHOLE_HEAD + b"GET /v1", WHOLE_HEAD * 2 + b"G"]
)
async def test_a_head_that_does_not_come_is_not_waited_for(url: str, sent: bytes) -> None:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for start in range(0, len(sent), len(WHOLE_HEAD)):
        writer.write(sent[start : start + len(WHOLE_HEAD)])
        await writer.drain()
        if sent[start:].startswith(WHOLE_HEAD):  # answered before more is sent: nothing is pipelined
            await reader.readuntil(b"]}")
    assert await asyncio.wait_for(reader.read(), 10) == b""  # closed, long before the pause between requests is over
    writer.close()
    await writer.wait_closed()


async def test_a_long_answer_outlives_the_deadline_of_its_head(url: str, dispatcher: fakes.FakeDispatcher) -> None:
    dispatcher.never_ends = True
    async with httpx.AsyncClient(timeout=10) as http:
        async with http.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(3 * _Hurried.head_deadline_s):
                    await answer.aread()


class _Noted(_Hurried):
    """Says when a connection is gone."""

    gone: ClassVar[asyncio.Event]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_takes_nothing_of_a_whole_answer_is_let_go(reads: bool) -> None:
    """One that takes it slowly, over several deadlines, gets all of it."""
    body, half = b"x" * (8 << 20), 2 << 20

    async def answer(scope: object, receive: object, send: Callable[[Message], Awaitable[None]]) -> None:
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    _Noted.gone = asyncio.Event()
    server = uvicorn.Server(uvicorn.Config(answer, http=_Noted, log_level="warning", lifespan="off", ws="none"))
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else what is taken shows in large lumps
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        task = asyncio.create_task(server.serve([listener]))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            taken = 0
            while reads and taken < len(body):
                if taken < half:  # slowly, so that deadlines pass in between
                    await asyncio.sleep(_Hurried.take_deadline_s / 10)
                part = await loop.sock_recv(client, 1 << 16)
                assert part, f"cut off after {taken} bytes"
                taken += len(part)
            await _Noted.gone.wait()
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_client_that_stops_taking_events_is_let_go(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """By its connection, as with any answer; while it takes them slowly, over several deadlines, the stream goes on."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_stop_taking_events())


async def _stop_taking_events() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(0)  # as a step would be waited for
            yield b"data: " + b"x" * 1000 + b"\n\n"

    async def close() -> None:
        closed.set()

    _Noted.gone = asyncio.Event()
    config = uvicorn.Config(EventStream(events(), close), http=_Noted, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        task = asyncio.create_task(server.serve([listener]))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            began = time.monotonic()
            while time.monotonic() < began + 4 * _Hurried.take_deadline_s:
                assert await loop.sock_recv(client, 1 << 16)
                await asyncio.sleep(_Hurried.take_deadline_s / 10)
            assert not closed.is_set()
            await closed.wait()
            await _Noted.gone.wait()
        server.should_exit = True
        await asyncio.wait_for(task, 10)
