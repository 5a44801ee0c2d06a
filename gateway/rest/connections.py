"""How long may an HTTP connection take to say what it wants, and to take what it gets?

uvicorn bounds the pause between two requests, and the application bounds the body (`validation.read_body`); the head
of a request, which comes before any application, is bounded here. Without it, clients that send half a head and fall
silent would keep their connections, and with enough of them everybody else would get none. So is the time in which a
client takes nothing of an answer that waits for it: whole answers are written at once, and kept until they are taken.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_DEADLINE_S = 30.0
TAKE_DEADLINE_S = 120.0  # what is taken shows only in lumps, which the kernel's buffers make as large as a megabyte


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, closing a connection whose next head (request line and headers) is not whole in time, and one
    whose client takes nothing.

    head_deadline_s: from the connection, or from the first bytes of a further request on it. take_deadline_s: in which
    something of what waits to be sent must be taken.
    """

    head_deadline_s: ClassVar[float] = HEAD_DEADLINE_S
    take_deadline_s: ClassVar[float] = TAKE_DEADLINE_S
    _head_timer: asyncio.TimerHandle | None = None
    _take_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._forget_head()
        self._forget_take()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: more waits to be sent than should."""
        super().pause_writing()
        self._watch_take()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        self._forget_take()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_deadline_s, self._on_head_deadline)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_deadline(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _watch_take(self) -> None:
        self._forget_take()
        waiting = self.transport.get_write_buffer_size()
        self._take_timer = self.loop.call_later(self.take_deadline_s, self._on_take_deadline, waiting)

    def _forget_take(self) -> None:
        if self._take_timer is not None:
            self._take_timer.cancel()
            self._take_timer = None

    def _on_take_deadline(self, waiting: int) -> None:
        self._take_timer = None
        if self.transport.get_write_buffer_size() < waiting:
            self._watch_take()
        else:
            self.transport.abort()
