"""Does a gRPC service say that it serves?"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.stack.settings import reachable


class HealthClient:
    """One service's standard health check (grpc.health.v1) over one channel. `async with` it."""

    def __init__(self, listen: str) -> None:
        address = reachable(listen)
        host = f"[{address.host}]" if ":" in address.host else address.host
        # A proxy of the user's is not for this machine's own services; a refused connection is tried again soon.
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        ]
        self._channel = grpc.aio.insecure_channel(f"{host}:{address.port}", options=options)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> HealthClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def serving(self, timeout_s: float) -> bool:
        """Whether it answers SERVING within `timeout_s` seconds."""
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
