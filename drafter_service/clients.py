"""How does the drafter attach to a target?

Attach gets a channel description; for a `bytes` channel an Exchange stream then carries the entries. Everything here
waits for another process, so none of it runs on the device thread.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from drafter_service.channels import AttachedChannel, AttachOutcome
from drafter_service.codec import (
    attach_request_to_proto,
    channel_from_proto,
    exchange_opening,
    reply_entry_to_proto,
    ring_entry_from_proto,
)
from drafter_service.speculator import ChannelNeeds
from drafter_service.streams import GatewayStream
from engine.channel.bytes import BytesDrafterEnd
from engine.channel.cuda_ipc import CudaIpcDrafterEnd
from engine.channel.description import ChannelDescription
from engine.channel.host import host_id
from engine.channel.opening import attach_device_channel, attach_drafter_channel, device_uuid, kinds_of
from engine.channel.shm import ShmDrafterChannel
from engine.errors import ChannelError
from protos import target_pb2, target_pb2_grpc

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
MAX_DRAFTER_ID_LEN = 100
MAX_ATTACHES = 64  # under way at once, for all gateways together
POLL_S = 0.5  # how often a quiet Exchange stream looks whether its channel is still open
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted target is to be found at once, not after the growing pauses of a shared connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy in the environment is for the world outside, not for the services of one deployment.
    ("grpc.enable_http_proxy", 0),
    # An Exchange stream whose target vanished without a word ends; the target allows pings this often.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


# Puts a command into a stream's inbox; False: it is not wanted any more.
Submit = Callable[[GatewayStream, AttachOutcome], bool]


class TargetConnector:
    """Attaches to targets, in threads of its own.

    drafter_id: of the service. A target keeps one channel for each id, so each gateway attaches under one of its own.
    kinds: channel kinds to offer, best first. device: on which steps run without the host; None: they do not.
    """

    def __init__(
        self,
        needs: ChannelNeeds,
        drafter_id: str,
        instance_id: str,
        kinds: tuple[str, ...],
        attach_timeout_s: float,
        heartbeat_deadline_s: float,
        max_concurrent: int = 4,
        device: torch.device | None = None,
    ) -> None:
        self._needs = needs
        self._drafter_id = drafter_id
        self._instance_id = instance_id
        self._kinds = kinds_of(kinds, device)
        self._device = device
        self._device_uuid = "" if device is None else device_uuid(device)
        self._timeout_s = attach_timeout_s
        self._heartbeat_deadline_s = heartbeat_deadline_s
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="attach")
        self._places = threading.BoundedSemaphore(MAX_ATTACHES)

    def start_attach(self, stream: GatewayStream, target_address: str, submit: Submit) -> None:
        """Attach for a gateway's stream; the outcome is submitted to it as a command. Returns at once."""
        gateway_id = stream.gateway_id or ""
        if not self._places.acquire(blocking=False):
            submit(stream, AttachOutcome(target_address, None, f"{MAX_ATTACHES} attaches are under way already"))
            return

        def run() -> None:
            try:
                outcome = AttachOutcome(target_address, self.attach(gateway_id, target_address))
            except ChannelError as error:
                outcome = AttachOutcome(target_address, None, str(error))
            except Exception as error:  # nobody sees what a pool's thread raises, and the gateway waits for an answer
                _log.exception("attaching to %s", target_address)
                outcome = AttachOutcome(target_address, None, f"{type(error).__name__}: {error}")
            finally:
                self._places.release()
            if not submit(stream, outcome) and outcome.attached is not None:
                outcome.attached.detach()

        self._pool.submit(run)

    def attach(self, gateway_id: str, target_address: str) -> AttachedChannel:
        """Attach now. ChannelError says why not."""
        grpc_channel = grpc.insecure_channel(target_address, options=_OPTIONS)
        try:
            stub = target_pb2_grpc.TargetServiceStub(grpc_channel)
            request = attach_request_to_proto(
                self._needs,
                _attach_id(self._drafter_id, gateway_id),
                self._instance_id,
                host_id(),
                self._kinds,
                self._device_uuid,
            )
            try:
                reply = stub.Attach(request, timeout=self._timeout_s, wait_for_ready=True)
            except grpc.RpcError as error:
                raise ChannelError(f"the target at {target_address} gave no channel: {_reason(error)}") from error
            channel = self._take(channel_from_proto(reply.channel))
        except BaseException:
            grpc_channel.close()
            raise
        if isinstance(channel, BytesDrafterEnd):
            _Exchange(stub, channel).start()

        def detach() -> None:
            channel.close()
            self._submit_detach(stub, grpc_channel, channel)

        return AttachedChannel(channel, target_address, reply.target_instance_id, reply.max_model_len, detach)

    def _take(self, description: ChannelDescription) -> ShmDrafterChannel | BytesDrafterEnd | CudaIpcDrafterEnd:
        if self._device is not None:
            return attach_device_channel(description, self._device, self._heartbeat_deadline_s)
        return attach_drafter_channel(description, self._heartbeat_deadline_s, self._timeout_s)

    def close(self) -> None:
        """Wait for what runs, within the attach timeout; nothing new is taken."""
        self._pool.shutdown(wait=True)

    def _submit_detach(
        self,
        stub: target_pb2_grpc.TargetServiceStub,
        grpc_channel: grpc.Channel,
        channel: ShmDrafterChannel | BytesDrafterEnd | CudaIpcDrafterEnd,
    ) -> None:
        request = target_pb2.DetachRequest(channel_id=channel.spec.channel_id, epoch=channel.spec.epoch)

        def run() -> None:
            try:
                stub.Detach(request, timeout=self._timeout_s)
            except grpc.RpcError as error:  # it is gone, and the channel with it, or its lease will end the channel
                _log.info("channel %s not detached: %s", channel.spec.channel_id, _reason(error))
            finally:
                grpc_channel.close()

        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool is shut down: the service is stopping, and the lease ends the channel
            grpc_channel.close()


class _Exchange:
    """The Exchange stream of one `bytes` channel: two threads that end with the channel or the stream."""

    def __init__(self, stub: target_pb2_grpc.TargetServiceStub, end: BytesDrafterEnd) -> None:
        self._end = end
        self._stub = stub
        self._thread = threading.Thread(target=self._read, name="exchange", daemon=True)

    def start(self) -> None:
        """Start to carry entries."""
        self._end.link_up()
        self._thread.start()

    def _read(self) -> None:
        call = self._stub.Exchange(self._replies())
        try:
            for message in call:
                self._end.deliver(ring_entry_from_proto(message))
        except grpc.RpcError as error:
            _log.info("exchange of channel %s ended: %s", self._end.spec.channel_id, _reason(error))
        except ChannelError as error:
            _log.warning("exchange of channel %s: %s", self._end.spec.channel_id, error)
        finally:
            self._end.link_down()
            call.cancel()

    def _replies(self) -> Iterator[target_pb2.ReplyEntry]:
        yield exchange_opening(self._end.spec.channel_id, self._end.spec.epoch)
        while not self._end.closed:
            entry = self._end.outgoing(POLL_S)
            if entry is not None:
                yield reply_entry_to_proto(entry)


def _attach_id(drafter_id: str, gateway_id: str) -> str:
    suffix = hashlib.blake2b(gateway_id.encode(), digest_size=6).hexdigest()
    return f"{drafter_id[: MAX_DRAFTER_ID_LEN - len(suffix) - 1]}/{suffix}"


def _reason(error: grpc.RpcError) -> str:
    # Every error that a call raises is also the call itself; the class does not say so.
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    return f"{code().name}: {details()}" if callable(code) and callable(details) else str(error)
