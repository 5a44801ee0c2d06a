"""How do the DrafterService RPCs meet the device thread? Its streams are gateways' (`serving.streams`)."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from drafter_service.codec import command_from_proto, event_to_proto
from drafter_service.device_thread import DeviceThread
from drafter_service.streams import GatewayStream
from protos import drafter_pb2, drafter_pb2_grpc
from serving.streams import ServeStreams

SERVICE_NAME = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """The RPCs. Holds no request state of its own."""

    def __init__(self, device: DeviceThread, event_queue: int, gateway_lease_s: float) -> None:
        self._streams = ServeStreams(
            "drafter", device, GatewayStream, command_from_proto, event_to_proto, event_queue, gateway_lease_s
        )

    def close_streams(self) -> None:
        """End every Serve stream; new ones are refused."""
        self._streams.close()

    def Serve(
        self, request_iterator: Iterator[drafter_pb2.DrafterCommand], context: grpc.ServicerContext
    ) -> Iterator[drafter_pb2.DrafterEvent]:
        """One gateway's stream, until either side ends it."""
        return self._streams.serve(request_iterator, context)


def add_drafter_servicer(servicer: DrafterServicer, server: grpc.Server) -> None:
    """Register the RPCs with a server."""
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
