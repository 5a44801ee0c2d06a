"""How does the drafter process listen, and how does it stop?

Stopping: say NOT_SERVING, give gateways a moment to leave, then end the streams, the device thread and the channels, in
that order.
"""

from __future__ import annotations

import threading

import torch

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
from serving.server import RpcServer, drain

DEVICE_STOP_S = 30.0


class DrafterServer:
    """Owner of the RPC server, the device thread and the target connector."""

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
        self._servicer = DrafterServicer(self._device, config.event_queue, config.gateway_lease_s)
        self._rpc = RpcServer(
            config.listen, "drafter.listen", SERVICE_NAME, lambda server: add_drafter_servicer(self._servicer, server)
        )
        self.address = self._rpc.address

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
        self._rpc.start()

    def stop(self) -> None:
        """Drain and stop; after a failure there is nothing to drain. Blocks until everything is given back."""
        self._rpc.say_not_serving()
        drain(self._device.num_resident, self._drain_s, self._device.failed)
        self._servicer.close_streams()
        self._rpc.stop()
        self._device.stop(DEVICE_STOP_S)
        self._connector.close()
        self._rpc.close()


def _device_deadline_s(config: DrafterConfig, device: torch.device) -> float | None:
    """The most that a step may take on the device once the one before it is done: what it may wait for its entry, and
    what it may take then.
    """
    return config.device_deadline_s + config.max_entry_wait_s if device.type == "cuda" else None
