"""How do the DrafterService RPCs meet the device thread?

A Serve stream has two threads: one reads commands into the stream's inbox, the RPC's own sends events from its outbox.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator

import grpc

from drafter_service.codec import command_from_proto, event_to_proto
from drafter_service.device_thread import DeviceThread
from drafter_service.messages import Event
from drafter_service.streams import GatewayStream
from engine.outbox import Outbox
from protos import drafter_pb2, drafter_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAME = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name
POLL_S = 1.0  # how often a quiet stream looks whether its peer is still there


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """The RPCs. Holds no request state of its own."""

    def __init__(self, device: DeviceThread, event_queue: int) -> None:
        self._device = device
        self._event_queue = event_queue
        self._stream_ids = itertools.count(1)
        self._outboxes: dict[int, Outbox[Event]] = {}
        self._lock = threading.Lock()
        self._closing = False

    def close_streams(self) -> None:
        """End every Serve stream; new ones are refused."""
        with self._lock:
            self._closing = True
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.close()

    def Serve(
        self, request_iterator: Iterator[drafter_pb2.DrafterCommand], context: grpc.ServicerContext
    ) -> Iterator[drafter_pb2.DrafterEvent]:
        """One gateway's stream, until either side ends it."""
        stream = GatewayStream(next(self._stream_ids), Outbox(self._event_queue, on_overflow=context.cancel))
        if not self._open_stream(stream) or not context.add_callback(lambda: self._close_stream(stream)):
            self._close_stream(stream)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the drafter is stopping")
        # The reader outlives this generator, which a broken RPC may leave at any `yield`: so it is the reader that ends
        # the stream on the device, when its iterator ends, as it does with the RPC.
        threading.Thread(
            target=self._read_commands, args=(request_iterator, stream), name=f"stream-{stream.stream_id}", daemon=True
        ).start()
        while not stream.outbox.finished():
            event = stream.outbox.take(POLL_S)
            if event is not None:
                yield event_to_proto(event)

    def _open_stream(self, stream: GatewayStream) -> bool:
        with self._lock:
            if not self._closing:
                self._outboxes[stream.stream_id] = stream.outbox
            return not self._closing

    def _close_stream(self, stream: GatewayStream) -> None:
        stream.outbox.close()
        with self._lock:
            self._outboxes.pop(stream.stream_id, None)

    def _read_commands(self, messages: Iterator[drafter_pb2.DrafterCommand], stream: GatewayStream) -> None:
        try:
            for message in messages:
                if not self._device.submit(stream, command_from_proto(message)):
                    break
        except grpc.RpcError:
            _log.info("stream %d broke", stream.stream_id)
        finally:
            self._device.end_stream(stream)


def add_drafter_servicer(servicer: DrafterServicer, server: grpc.Server) -> None:
    """Register the RPCs with a server."""
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
