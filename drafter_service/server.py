"""How does the drafter process listen, and how does it stop?

A gRPC server with DrafterService, health ("" and the service's name) and reflection. Stopping: say NOT_SERVING, give
gateways a moment to leave, then end the streams, the device thread and the channels, in that order.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from drafter_service.channels import AttachOutcome
from drafter_service.clients import TargetConnector
from drafter_service.config import DrafterConfig
from drafter_service.core import DrafterCore
from drafter_service.device.making import make_device_steps
from drafter_service.device.program import DrafterProgram
from drafter_service.device_thread import DeviceThread
from drafter_service.messages import ServiceInfo
from drafter_service.servicer import SERVICE_NAME, DrafterServicer, add_drafter_servicer
from drafter_service.speculator import Speculator
from drafter_service.streams import GatewayStream, Inboxes
from engine.device_deadline import DeviceDeadline
from engine.errors import ConfigError

MAX_MESSAGE_BYTES = 1 << 28
# Every Serve and health Watch stream holds a thread of the pool for as long as it lasts.
MAX_STREAMS = 64
STOP_GRACE_S = 2.0
DEVICE_STOP_S = 30.0
DRAIN_POLL_S = 0.05


class DrafterServer:
    """Owner of the gRPC server, the device thread and the target connector."""

    def __init__(
        self, config: DrafterConfig, info: ServiceInfo, speculator: Speculator, program: DrafterProgram | None = None
    ) -> None:
        """Bind the address. program: the speculator's device form, None with host execution. ConfigError when the
        address cannot be had.
        """
        self._drain_s = config.drain_s
        self._connector = TargetConnector(
            speculator.needs,
            config.drafter_id,
            info.instance_id,
            config.channel_kinds,
            config.attach_timeout_s,
            config.heartbeat_deadline_s,
            device=None if program is None else program.device,
        )
        inboxes = Inboxes(config.command_queue)
        device = torch.device(config.device)
        deadline = DeviceDeadline(_device_deadline_s(config, device), lambda reason: self._device.lose(reason))

        def submit(stream: GatewayStream, outcome: AttachOutcome) -> bool:
            return inboxes.put(stream, outcome, None)

        core = DrafterCore(
            info,
            speculator,
            config.num_seats,
            config.max_entry_wait_s,
            lambda stream, address: self._connector.start_attach(stream, address, submit),
            None
            if program is None
            else lambda residents: make_device_steps(
                program, speculator.needs, residents, config.max_entry_wait_s, inboxes.nudge, deadline
            ),
        )
        self._device = DeviceThread(core, inboxes, config.threads, config.check_integrity, device, deadline)
        self._servicer = DrafterServicer(self._device, config.event_queue)
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # a second drafter on the same port fails instead of sharing its calls
                # A gateway that vanished without a word holds its requests no longer than this.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
        )
        add_drafter_servicer(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = config.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(config.listen)
        except RuntimeError as error:
            raise ConfigError("drafter.listen", f"cannot listen on {config.listen}: in use or not ours") from error
        self.address = f"{host}:{port}"

    @property
    def device_error(self) -> str | None:
        """What the GPU failed with, where that ended the device thread: the process can only end at once."""
        return self._device.device_error

    @property
    def failed(self) -> threading.Event:
        """Set when the device thread has failed: the process is of no use any more."""
        return self._device.failed

    def start(self) -> None:
        """Take calls."""
        self._device.start()
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Drain and stop. Blocks until everything is given back."""
        self._health.enter_graceful_shutdown()
        deadline = time.monotonic() + self._drain_s
        pause = threading.Event()
        while self._device.num_resident() and time.monotonic() < deadline:
            pause.wait(DRAIN_POLL_S)  # the device thread tells nobody when it becomes idle
        self._servicer.close_streams()
        self._server.stop(STOP_GRACE_S).wait()
        self._device.stop(DEVICE_STOP_S)
        self._connector.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _device_deadline_s(config: DrafterConfig, device: torch.device) -> float | None:
    """The most that a step may take on the device once the one before it is done: what it may wait for its entry, and
    what it may take then.
    """
    return config.device_deadline_s + config.max_entry_wait_s if device.type == "cuda" else None
