"""How does a drafter process meet the fake target? Through a real server with Attach, Detach and Exchange."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from engine.channel.bytes import BytesTargetEnd, EntryMessage
from engine.channel.opening import choose_kind
from engine.decoder import Decoder
from protos import common_pb2, drafter_pb2, drafter_pb2_grpc, target_pb2, target_pb2_grpc
from tests.drafter_service.fake_target import FakeTarget


class FakeTargetService(target_pb2_grpc.TargetServiceServicer):
    """Every Attach makes a new FakeTarget; `targets` holds them by channel id, the newest epoch each.

    attaching: cleared, an Attach waits. attach_asked: one has come.
    """

    def __init__(self, decoder: Decoder, **options: Any) -> None:
        self._decoder = decoder
        self._options = options
        self._epochs = itertools.count(1)
        self.targets: dict[str, FakeTarget] = {}
        self.requests: list[target_pb2.AttachRequest] = []
        self.detached: queue.Queue[tuple[str, int]] = queue.Queue()
        self.attaching = threading.Event()
        self.attaching.set()
        self.attach_asked = threading.Event()
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()
        for target in self.targets.values():
            target.close()

    def Attach(self, request: target_pb2.AttachRequest, context: grpc.ServicerContext) -> target_pb2.AttachReply:
        self.requests.append(request)
        self.attach_asked.set()
        assert self.attaching.wait(10)
        kind = choose_kind(request.kinds, request.host_id)
        channel_id = f"fake/{request.drafter_id}"
        old = self.targets.pop(channel_id, None)
        if old is not None:
            old.close()
        target = FakeTarget(
            self._decoder,
            tuple(request.hidden_layers),
            kind=kind,
            channel_id=channel_id,
            epoch=next(self._epochs),
            max_draft_len=request.max_draft_len,
            draft_probs=request.draft_probs,
            **self._options,
        )
        self.targets[channel_id] = target
        description = target.describe()
        return target_pb2.AttachReply(
            channel=common_pb2.ChannelDescriptor(
                channel_id=description.channel_id,
                epoch=description.epoch,
                kind=description.kind,
                control=_region(description.control),
                regions=[_region(region) for region in description.regions],
                depth=description.depth,
                max_rows=description.max_rows,
                max_tokens=description.max_tokens,
                max_draft_len=description.max_draft_len,
                hidden_width=description.hidden_width,
                vocab_size=description.vocab_size,
                max_blocks_per_row=description.max_blocks_per_row,
                block_size=description.block_size,
                num_blocks=description.num_blocks,
                draft_probs=description.draft_probs,
            ),
            target_instance_id="fake",
            dtype="float32",
            hidden_size=self._decoder.config.hidden_size,
            max_model_len=target.max_len,
        )

    def Detach(self, request: target_pb2.DetachRequest, context: grpc.ServicerContext) -> target_pb2.DetachReply:
        self.detached.put((request.channel_id, request.epoch))
        return target_pb2.DetachReply()

    def Exchange(
        self, request_iterator: Iterator[target_pb2.ReplyEntry], context: grpc.ServicerContext
    ) -> Iterator[target_pb2.RingEntry]:
        first = next(request_iterator)
        end = self.targets[first.channel_id].channel
        assert isinstance(end, BytesTargetEnd)
        end.link_up()
        context.add_callback(end.link_down)

        def read() -> None:
            try:
                for message in request_iterator:
                    end.deliver(
                        EntryMessage(
                            message.channel_id, message.epoch, message.seq, message.num_rows, 0, dict(message.tensors)
                        )
                    )
            except grpc.RpcError:
                end.link_down()

        threading.Thread(target=read, daemon=True).start()
        while not end.closed:
            entry = end.outgoing(0.1)
            if entry is not None:
                yield target_pb2.RingEntry(
                    channel_id=entry.channel_id,
                    epoch=entry.epoch,
                    seq=entry.seq,
                    num_rows=entry.num_rows,
                    num_tokens=entry.num_tokens,
                    tensors=entry.tensors,
                )


def _region(region: Any) -> common_pb2.RegionDescriptor:
    return common_pb2.RegionDescriptor(
        name=region.name,
        kind=region.kind,
        handle=region.handle,
        offset=region.offset,
        shape=region.shape,
        dtype=region.dtype,
        device_uuid=region.device_uuid,
    )


class Gateway:
    """A test's Serve stream to a drafter: send commands, wait for events."""

    def __init__(self, address: str, gateway_id: str = "gateway") -> None:
        self._channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(self._channel).result(timeout=30)
        self._commands: queue.Queue[drafter_pb2.DrafterCommand | None] = queue.Queue()
        self._call = drafter_pb2_grpc.DrafterServiceStub(self._channel).Serve(iter(self._commands.get, None))
        self._events: queue.Queue[drafter_pb2.DrafterEvent | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.send(hello=drafter_pb2.DrafterHello(gateway_id=gateway_id))
        self.info = self.next("info").info

    def send(self, **command: Any) -> None:
        self._commands.put(drafter_pb2.DrafterCommand(**command))

    def next(self, kind: str, timeout: float = 20.0) -> drafter_pb2.DrafterEvent:
        """The next event, which must be of this kind."""
        event = self._events.get(timeout=timeout)
        assert event is not None, "the stream ended"
        assert event.WhichOneof("event") == kind, event
        return event

    def ended(self, timeout: float = 20.0) -> bool:
        """Whether the stream ends, with no event before it."""
        return self._events.get(timeout=timeout) is None

    def open(self, target_address: str) -> drafter_pb2.ChannelOpened:
        self.send(open=drafter_pb2.OpenChannel(target_address=target_address))
        return self.next("opened").opened

    def admit(self, **fields: Any) -> common_pb2.Admitted:
        self.send(admit=common_pb2.AdmitRequest(**fields))
        return self.next("admitted").admitted

    def plan(self, target: FakeTarget, draft_len: int, chunk: int = 64) -> drafter_pb2.DraftReport:
        """One step of all the fake target's requests; their drafts are set."""
        requests = list(target.requests.values())
        rows = target.plan_rows(requests, chunk)
        self.send(
            plan=common_pb2.StepPlan(
                seq=target.seq + 1,
                channel_id=target.spec.channel_id,
                channel_epoch=target.spec.epoch,
                rows=[
                    common_pb2.RowPlan(request_id=row.request.request_id, epoch=1, draft_len=draft_len) for row in rows
                ],
                deadline_ms=2000,
            )
        )
        seq = target.step(rows)
        reply = target.channel.take_reply(seq, 10.0)
        assert reply is not None
        for request, tokens in zip(requests, reply.tokens.tolist(), strict=True):
            request.drafts = [token for token in tokens if token >= 0]
        return self.next("report").report

    def close(self) -> None:
        self._commands.put(None)
        self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        try:
            for event in self._call:
                self._events.put(event)
        except grpc.RpcError:
            pass  # however the stream ended, `None` says that it did
        self._events.put(None)


def fields_of(request_id: str, tokens: Sequence[int], channel_id: str, **more: Any) -> dict[str, Any]:
    """AdmitRequest's fields for a fresh request."""
    return {
        "request_id": request_id,
        "epoch": 1,
        "token_ids": tokens,
        "prompt_len": len(tokens),
        "max_total_len": 200,
        "channel_id": channel_id,
        **more,
    }
