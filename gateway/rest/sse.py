"""How does an answer reach the client while it grows, and what happens when the client is gone?

Server-sent events (WHATWG HTML, section 9.2): one `data:` line of JSON each, `[DONE]` at the end. The connection is
watched beside the work: a client that leaves, streamed to or waiting for one whole answer, cancels the work at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"
# JSON leaves these as they are, and readers that split text into lines take them for line ends.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class ClientLeft(Exception):
    """The connection ended before the answer did. Nobody is left to tell."""


def event_bytes(content: dict[str, Any]) -> bytes:
    """One event."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.translate(_LINE_ENDS).encode() + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client leaves first; raises ClientLeft then.

    receive: the connection's ASGI receive, after the whole body was read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await _cancel(watcher, task)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends the events of `events` as they come and closes it in every case: at its end, on an error, when the client
    leaves. One that takes nothing any more is made to leave by its connection (see `connections`).

    events: encoded events, `[DONE]` among them. An iterator that raises ends the response as a broken connection.
    close: called at the end, for what `events` reads from: a generator that was never begun closes nothing by itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientLeft, OSError):  # OSError: the server noticed while sending
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
