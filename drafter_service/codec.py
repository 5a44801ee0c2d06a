"""How do DrafterService's and TargetService's protobuf messages and the drafter's own values translate into each other?

Reading a gateway's message never fails: one that means nothing becomes an `Unreadable` command, answered by a fault.
"""

from __future__ import annotations

from drafter_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Capacity,
    ChannelReply,
    Command,
    Event,
    FaultReply,
    Hello,
    OpenChannel,
    ReleaseReply,
    ReleaseRequest,
    RowRequest,
    ServiceInfo,
    StepReport,
    StepRequest,
    Unreadable,
)
from drafter_service.speculator import ChannelNeeds
from engine.channel.bytes import EntryMessage
from engine.channel.description import ChannelDescription, RegionDescription
from engine.errors import ProtocolError
from protos import common_pb2, drafter_pb2, target_pb2

_ADMIT_STATUS = {
    AdmissionStatus.OK: common_pb2.ADMIT_STATUS_OK,
    AdmissionStatus.NO_SEAT: common_pb2.ADMIT_STATUS_NO_SEAT,
    AdmissionStatus.INVALID: common_pb2.ADMIT_STATUS_INVALID,
}


def command_from_proto(message: drafter_pb2.DrafterCommand) -> Command:
    """The command a gateway sent; `Unreadable` when the message holds none that this version knows."""
    match message.WhichOneof("command"):
        case "hello":
            return Hello(message.hello.gateway_id)
        case "open":
            return OpenChannel(message.open.target_address)
        case "admit":
            return _admission(message.admit)
        case "plan":
            return _step_request(message.plan)
        case "release":
            return ReleaseRequest(message.release.request_id, message.release.epoch)
        case _:
            return Unreadable(ProtocolError("command: the message holds none that this drafter knows"))


def event_to_proto(event: Event) -> drafter_pb2.DrafterEvent:
    """The event as the gateway reads it."""
    match event:
        case StepReport():
            return drafter_pb2.DrafterEvent(report=_report(event))
        case AdmissionReply():
            return drafter_pb2.DrafterEvent(
                admitted=common_pb2.Admitted(
                    request_id=event.request_id,
                    epoch=event.epoch,
                    status=_ADMIT_STATUS[event.status],
                    cached_len=event.cached_len,
                    field=event.field,
                    detail=event.detail,
                    capacity=_capacity(event.capacity),
                )
            )
        case ReleaseReply():
            return drafter_pb2.DrafterEvent(
                released=common_pb2.Released(
                    request_id=event.request_id, epoch=event.epoch, capacity=_capacity(event.capacity)
                )
            )
        case ChannelReply():
            return drafter_pb2.DrafterEvent(
                opened=drafter_pb2.ChannelOpened(
                    target_address=event.target_address,
                    ok=event.ok,
                    channel_id=event.channel_id,
                    channel_epoch=event.channel_epoch,
                    kind=event.kind,
                    target_instance_id=event.target_instance_id,
                    detail=event.detail,
                )
            )
        case ServiceInfo():
            return drafter_pb2.DrafterEvent(info=_info(event))
        case FaultReply():
            return drafter_pb2.DrafterEvent(
                fault=drafter_pb2.DraftFault(
                    kind=event.kind, detail=event.detail, seq=event.seq, request_id=event.request_id
                )
            )


def attach_request_to_proto(
    needs: ChannelNeeds, drafter_id: str, instance_id: str, host_id: str, kinds: tuple[str, ...], device_uuid: str = ""
) -> target_pb2.AttachRequest:
    """What the drafter asks of a target."""
    return target_pb2.AttachRequest(
        drafter_id=drafter_id,
        instance_id=instance_id,
        host_id=host_id,
        kinds=kinds,
        hidden_layers=needs.hidden_layers,
        max_draft_len=needs.max_draft_len,
        draft_probs=needs.draft_probs,
        metadata_source=needs.metadata_source,
        block_size=needs.block_size,
        num_blocks=needs.num_blocks,
        vocab_size=needs.vocab_size,
        device_uuid=device_uuid,
    )


def channel_from_proto(message: common_pb2.ChannelDescriptor) -> ChannelDescription:
    """Where the target says that the channel's memory is."""
    return ChannelDescription(
        channel_id=message.channel_id,
        epoch=message.epoch,
        kind=message.kind,
        control=_region(message.control),
        regions=tuple(_region(region) for region in message.regions),
        depth=message.depth,
        max_rows=message.max_rows,
        max_tokens=message.max_tokens,
        max_draft_len=message.max_draft_len,
        hidden_width=message.hidden_width,
        vocab_size=message.vocab_size,
        max_blocks_per_row=message.max_blocks_per_row,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        draft_probs=message.draft_probs,
    )


def ring_entry_from_proto(message: target_pb2.RingEntry) -> EntryMessage:
    """A ring entry from the target."""
    return EntryMessage(
        message.channel_id, message.epoch, message.seq, message.num_rows, message.num_tokens, dict(message.tensors)
    )


def reply_entry_to_proto(entry: EntryMessage) -> target_pb2.ReplyEntry:
    """A reply entry on its way to the target."""
    return target_pb2.ReplyEntry(
        channel_id=entry.channel_id,
        epoch=entry.epoch,
        seq=entry.seq,
        num_rows=entry.num_rows,
        tensors=entry.tensors,
    )


def exchange_opening(channel_id: str, epoch: int) -> target_pb2.ReplyEntry:
    """The first message of an Exchange stream: which channel it is for."""
    return target_pb2.ReplyEntry(channel_id=channel_id, epoch=epoch)


def _admission(message: common_pb2.AdmitRequest) -> Admission:
    return Admission(
        request_id=message.request_id,
        epoch=message.epoch,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        max_total_len=message.max_total_len,
        channel_id=message.channel_id,
        mid_stream=message.mid_stream,
        seeded=message.sampling.seeded,
        temperature=message.sampling.temperature,
    )


def _step_request(message: common_pb2.StepPlan) -> StepRequest:
    return StepRequest(
        seq=message.seq,
        channel_id=message.channel_id,
        channel_epoch=message.channel_epoch,
        rows=tuple(
            RowRequest(row.request_id, row.epoch, row.draft_len, row.context_len, row.query_len) for row in message.rows
        ),
        deadline_ms=message.deadline_ms,
        ahead=message.ahead,
    )


def _region(message: common_pb2.RegionDescriptor) -> RegionDescription:
    return RegionDescription(
        name=message.name,
        kind=message.kind,
        handle=message.handle,
        offset=message.offset,
        shape=tuple(message.shape),
        dtype=message.dtype,
        device_uuid=message.device_uuid,
    )


def _capacity(capacity: Capacity) -> common_pb2.Capacity:
    return common_pb2.Capacity(free_seats=capacity.free_seats, free_blocks=capacity.free_blocks)


def _info(info: ServiceInfo) -> drafter_pb2.DrafterInfo:
    return drafter_pb2.DrafterInfo(
        instance_id=info.instance_id,
        drafter_id=info.drafter_id,
        method=info.method,
        max_draft_len=info.max_draft_len,
        version=info.version,
        vocab_size=info.vocab_size,
    )


def _report(report: StepReport) -> drafter_pb2.DraftReport:
    times = report.times
    return drafter_pb2.DraftReport(
        seq=report.seq,
        channel_id=report.channel_id,
        missed=report.missed,
        cold_request_ids=report.cold_request_ids,
        num_drafted=report.num_drafted,
        metadata_builds=report.metadata_builds,
        metadata_launches=report.metadata_launches,
        wait_ms=times.wait_ms,
        prefill_ms=times.prefill_ms,
        draft_ms=times.draft_ms,
        total_ms=times.total_ms,
        capacity=_capacity(report.capacity),
    )
