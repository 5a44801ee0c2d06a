"""How do the TargetService RPCs meet the device thread?

Serve streams are gateways' (`serving.streams`). Attach, Detach and Exchange serve drafters and touch only the channels.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator

import grpc

from engine.channel.bytes import BytesTargetEnd
from engine.errors import ChannelError, InvalidRequest, OutriderError
from protos import target_pb2, target_pb2_grpc
from serving.streams import FIRST_MESSAGE_S, ServeStreams, next_message
from target_service.channels import TargetChannels
from target_service.codec import (
    attach_reply_to_proto,
    attach_request_from_proto,
    command_from_proto,
    event_to_proto,
    reply_entry_from_proto,
    ring_entry_to_proto,
)
from target_service.device_thread import DeviceThread
from target_service.streams import GatewayStream

_log = logging.getLogger(__name__)

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
POLL_S = 1.0  # how often a quiet Exchange stream looks whether its channel is still open


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """The RPCs. Holds no request state of its own."""

    def __init__(
        self, device: DeviceThread, channels: TargetChannels, event_queue: int, gateway_lease_s: float
    ) -> None:
        self._channels = channels
        self._streams = ServeStreams(
            "target", device, GatewayStream, command_from_proto, event_to_proto, event_queue, gateway_lease_s
        )

    def close_streams(self) -> None:
        """End every Serve stream; new ones are refused."""
        self._streams.close()

    def Serve(
        self, request_iterator: Iterator[target_pb2.TargetCommand], context: grpc.ServicerContext
    ) -> Iterator[target_pb2.TargetEvent]:
        """One gateway's stream, until either side ends it."""
        return self._streams.serve(request_iterator, context)

    def Attach(self, request: target_pb2.AttachRequest, context: grpc.ServicerContext) -> target_pb2.AttachReply:
        """Export a channel for a drafter."""
        try:
            return attach_reply_to_proto(self._channels.attach(attach_request_from_proto(request)))
        except InvalidRequest as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ChannelError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OutriderError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        raise AssertionError("abort raises")

    def Detach(self, request: target_pb2.DetachRequest, context: grpc.ServicerContext) -> target_pb2.DetachReply:
        """Give a channel up. One that is gone already is as good as detached."""
        self._channels.detach(request.channel_id, request.epoch)
        return target_pb2.DetachReply()

    def Exchange(
        self, request_iterator: Iterator[target_pb2.ReplyEntry], context: grpc.ServicerContext
    ) -> Iterator[target_pb2.RingEntry]:
        """Carry a `bytes` channel's entries.

        The first message names the channel (channel_id, epoch; seq 0, no tensors); then replies come in and ring
        entries go out until the channel or the stream ends.
        """
        try:
            first = next_message(request_iterator, FIRST_MESSAGE_S)
        except TimeoutError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{error}; the first one names the channel")
        if first is None:
            return
        try:
            end = self._channels.exchange_end(first.channel_id, first.epoch)
            end.link_up()
        except ChannelError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        if not context.add_callback(end.link_down):
            end.link_down()
        threading.Thread(
            target=_read_replies, args=(request_iterator, first, end), name="exchange", daemon=True
        ).start()
        while not end.closed:
            entry = end.outgoing(POLL_S)
            if entry is not None:
                yield ring_entry_to_proto(entry)


def add_target_servicer(servicer: TargetServicer, server: grpc.Server) -> None:
    """Register the RPCs with a server."""
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)


def _read_replies(messages: Iterator[target_pb2.ReplyEntry], first: target_pb2.ReplyEntry, end: BytesTargetEnd) -> None:
    try:
        for message in itertools.chain([first], messages):
            if message.seq > 0:
                end.deliver(reply_entry_from_proto(message))
    except ChannelError as error:
        _log.warning("channel %s: %s", end.spec.channel_id, error)
    except grpc.RpcError:
        _log.info("channel %s: the exchange broke off", end.spec.channel_id)
    finally:
        end.link_down()
