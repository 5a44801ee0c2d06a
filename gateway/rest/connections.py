"""How long may an HTTP connection take to say what it wants?

uvicorn bounds the pause between two requests, and the application bounds the body (`validation.read_body`); the head
of a request, which comes before any application, is bounded here. Without it, clients that send half a head and fall
silent would keep their connections, and with enough of them everybody else would get none.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_DEADLINE_S = 30.0


class HeadDeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, closing a connection whose next head (request line and headers) is not whole in time.

    head_deadline_s: from the connection, or from the first bytes of a further request on it.
    """

    head_deadline_s: ClassVar[float] = HEAD_DEADLINE_S
    _head_timer: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)

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
