"""How does the target process listen, and how does it stop?

Stopping: say NOT_SERVING, let running requests end for a while, then end the streams, the device thread and the
channels, in that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from serving.server import RpcServer, drain
from target_service.assembly import Target
from target_service.config import TargetConfig
from target_service.device_thread import DeviceThread
from target_service.pcp.settings import awaited_s, collective_timeout_s
from target_service.servicer import SERVICE_NAME, TargetServicer, add_target_servicer

DEVICE_STOP_S = 30.0


class TargetServer:
    """Owner of the RPC server and of the device thread."""

    def __init__(self, config: TargetConfig, target: Target, on_failure: Callable[[], object] = lambda: None) -> None:
        """Bind the address. ConfigError when it cannot be. on_failure: called, from another thread, when a bug has
        ended the device thread, or the device or a rank is lost; the caller should stop the server then.
        """
        self._drain_s = config.drain_s
        self._on_failure = on_failure
        self._failed = threading.Event()
        self._target = target
        engine = target.engine
        self._device = DeviceThread(
            target.core,
            config.command_queue,
            config.threads,
            self._fail,
            engine.device,
            engine.stream,
            deadline_s=_device_deadline_s(config, engine.device),
        )
        self._servicer = TargetServicer(self._device, target.channels, config.event_queue, config.gateway_lease_s)
        self._rpc = RpcServer(
            config.listen, "target.listen", SERVICE_NAME, lambda server: add_target_servicer(self._servicer, server)
        )
        self.address = self._rpc.address
        if engine.ranks is not None:
            engine.ranks.watch(self._fail)  # already now: warming up runs steps over them

    @property
    def lost(self) -> str:
        """Why the device was lost; empty while it was not."""
        return self._device.lost

    def start(self) -> None:
        """Take calls."""
        self._device.start()
        self._rpc.start()

    def stop(self) -> None:
        """Drain and stop; after a failure there is nothing to drain. Blocks until everything is freed."""
        self._rpc.say_not_serving()
        drain(self._device.num_resident, self._drain_s, self._failed)
        self._servicer.close_streams()
        self._rpc.stop()
        self._device.stop(DEVICE_STOP_S)
        self._target.close()
        self._rpc.close()

    def _fail(self) -> None:
        self._failed.set()
        self._rpc.say_not_serving()
        self._on_failure()


def _device_deadline_s(config: TargetConfig, device: torch.device) -> float | None:
    """The most that one command may take on the device: what one step may, and all that it may wait for. A command
    completes at most the steps under way, and launches or runs one.
    """
    if device.type != "cuda":
        return None
    # Ranks end it themselves, earlier, where they stand in a collective.
    waits_s = collective_timeout_s(config, True) if config.pcp_size > 1 else awaited_s(config)
    return config.device_deadline_s + waits_s
