"""How does a test get a localhost port that nobody else takes before its server does?

By binding it and keeping it bound, without listening. On Linux a second socket may bind such a port when both ask for
SO_REUSEADDR and neither listens yet: gRPC servers and asyncio's (so uvicorn) do ask for it. Port-0 binds and outgoing
connections of anybody else avoid it as long as it is held, over restarts of the server too.
"""

from __future__ import annotations

import socket


class ReservedPort:
    """A localhost port held until `close`. Servers bind it while it is held."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()
