"""How does the target process listen, and how does it stop?

A gRPC server with TargetService, health ("" and the service's name) and reflection. Stopping: say NOT_SERVING, let
running requests end for a while, then end the streams, the device thread and the channels, in that order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.errors import ConfigError
from target_service.assembly import Target
from target_service.config import TargetConfig
from target_service.device_thread import DeviceThread
from target_service.servicer import SERVICE_NAME, TargetServicer, add_target_servicer

MAX_MESSAGE_BYTES = 1 << 30
# Every Serve, Exchange and health Watch stream holds a thread of the pool for as long as it lasts.
MAX_STREAMS = 64
STOP_GRACE_S = 2.0
DEVICE_STOP_S = 30.0
DRAIN_POLL_S = 0.05


class TargetServer:
    """Owner of the gRPC server and of the device thread."""

    def __init__(self, config: TargetConfig, target: Target, on_failure: Callable[[], object] = lambda: None) -> None:
        """Bind the address. ConfigError when it cannot be. on_failure: called, from another thread, when a bug has
        ended the device thread, or a rank is lost; the caller should stop the server then.
        """
        self._drain_s = config.drain_s
        self._on_failure = on_failure
        self._failed = threading.Event()
        self._target = target
        engine = target.engine
        self._device = DeviceThread(
            target.core, config.command_queue, config.threads, self._fail, engine.device, engine.stream
        )
        self._servicer = TargetServicer(self._device, target.channels, config.event_queue)
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            maximum_concurrent_rpcs=MAX_STREAMS,  # one more is refused; it would wait for a thread without a deadline
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # a second target on the same port fails instead of sharing its calls
                # A gateway that vanished without a word holds its requests no longer than this.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
        )
        add_target_servicer(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = config.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(config.listen)
        except RuntimeError as error:
            raise ConfigError("target.listen", f"cannot listen on {config.listen}: in use or not ours") from error
        self.address = f"{host}:{port}"
        if engine.ranks is not None:
            engine.ranks.watch(self._fail)  # already now: warming up runs steps over them

    @property
    def lost(self) -> str:
        """Why the device was lost; empty while it was not."""
        return self._device.lost

    def start(self) -> None:
        """Take calls."""
        self._device.start()
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Drain and stop; after a failure there is nothing to drain. Blocks until everything is freed."""
        self._health.enter_graceful_shutdown()
        deadline = time.monotonic() + self._drain_s
        pause = threading.Event()
        while self._device.num_resident() and time.monotonic() < deadline and not self._failed.is_set():
            pause.wait(DRAIN_POLL_S)  # the device thread tells nobody when it becomes idle
        self._servicer.close_streams()
        self._server.stop(STOP_GRACE_S).wait()
        self._device.stop(DEVICE_STOP_S)
        self._target.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fail(self) -> None:
        self._failed.set()
        self._health.enter_graceful_shutdown()  # says NOT_SERVING from now on
        self._on_failure()
