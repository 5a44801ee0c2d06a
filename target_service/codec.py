"""How do TargetService's protobuf messages and the service's own values translate into each other?

Reading never fails: a message that means nothing becomes an `Unreadable` command, which is answered by a fault.
"""

from __future__ import annotations

from engine.channel.bytes import EntryMessage
from engine.channel.description import ChannelDescription, RegionDescription
from engine.errors import ProtocolError
from protos import common_pb2, target_pb2
from target_service.channels import Attached, AttachRequest
from target_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Capacity,
    Command,
    Event,
    FaultReply,
    Hello,
    ReleaseReply,
    ReleaseRequest,
    RowRequest,
    RowStatus,
    SamplingSettings,
    ServiceInfo,
    StepReply,
    StepRequest,
    Unreadable,
)

_ADMIT_STATUS = {
    AdmissionStatus.OK: common_pb2.ADMIT_STATUS_OK,
    AdmissionStatus.NO_SEAT: common_pb2.ADMIT_STATUS_NO_SEAT,
    AdmissionStatus.INVALID: common_pb2.ADMIT_STATUS_INVALID,
}
_ROW_STATUS = {
    RowStatus.OK: target_pb2.ROW_STATUS_OK,
    RowStatus.STARVED: target_pb2.ROW_STATUS_STARVED,
    RowStatus.UNKNOWN: target_pb2.ROW_STATUS_UNKNOWN,
    RowStatus.SKIPPED: target_pb2.ROW_STATUS_SKIPPED,
}


def command_from_proto(message: target_pb2.TargetCommand) -> Command:
    """The command a gateway sent; `Unreadable` when the message holds none that this version knows."""
    match message.WhichOneof("command"):
        case "hello":
            return Hello(message.hello.gateway_id)
        case "admit":
            return _admission(message.admit)
        case "plan":
            return _step_request(message.plan)
        case "release":
            return ReleaseRequest(message.release.request_id, message.release.epoch)
        case _:
            return Unreadable(ProtocolError("command: the message holds none that this target knows"))


def event_to_proto(event: Event) -> target_pb2.TargetEvent:
    """The event as the gateway reads it."""
    match event:
        case StepReply():
            message = target_pb2.TargetEvent()
            _write_step_result(event, message.result)
            return message
        case AdmissionReply():
            return target_pb2.TargetEvent(
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
            return target_pb2.TargetEvent(
                released=common_pb2.Released(
                    request_id=event.request_id, epoch=event.epoch, capacity=_capacity(event.capacity)
                )
            )
        case ServiceInfo():
            return target_pb2.TargetEvent(info=_info(event))
        case FaultReply():
            return target_pb2.TargetEvent(
                fault=target_pb2.Fault(kind=event.kind, detail=event.detail, seq=event.seq, request_id=event.request_id)
            )


def attach_request_from_proto(message: target_pb2.AttachRequest) -> AttachRequest:
    """What a drafter asks for."""
    return AttachRequest(
        drafter_id=message.drafter_id,
        instance_id=message.instance_id,
        host_id=message.host_id,
        kinds=tuple(message.kinds),
        hidden_layers=tuple(message.hidden_layers),
        max_draft_len=message.max_draft_len,
        draft_probs=message.draft_probs,
        metadata_source=message.metadata_source,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        vocab_size=message.vocab_size,
        device_uuid=message.device_uuid,
    )


def attach_reply_to_proto(attached: Attached) -> target_pb2.AttachReply:
    """What a drafter gets."""
    return target_pb2.AttachReply(
        channel=_channel_descriptor(attached.channel),
        target_instance_id=attached.target_instance_id,
        dtype=attached.dtype,
        hidden_size=attached.hidden_size,
        max_model_len=attached.max_model_len,
    )


def ring_entry_to_proto(entry: EntryMessage) -> target_pb2.RingEntry:
    """A ring entry on its way to the drafter."""
    return target_pb2.RingEntry(
        channel_id=entry.channel_id,
        epoch=entry.epoch,
        seq=entry.seq,
        num_rows=entry.num_rows,
        num_tokens=entry.num_tokens,
        tensors=entry.tensors,
    )


def reply_entry_from_proto(message: target_pb2.ReplyEntry) -> EntryMessage:
    """A reply entry from the drafter."""
    return EntryMessage(message.channel_id, message.epoch, message.seq, message.num_rows, 0, dict(message.tensors))


def _channel_descriptor(channel: ChannelDescription) -> common_pb2.ChannelDescriptor:
    return common_pb2.ChannelDescriptor(
        channel_id=channel.channel_id,
        epoch=channel.epoch,
        kind=channel.kind,
        control=_region_descriptor(channel.control),
        regions=[_region_descriptor(region) for region in channel.regions],
        depth=channel.depth,
        max_rows=channel.max_rows,
        max_tokens=channel.max_tokens,
        max_draft_len=channel.max_draft_len,
        hidden_width=channel.hidden_width,
        vocab_size=channel.vocab_size,
        max_blocks_per_row=channel.max_blocks_per_row,
        block_size=channel.block_size,
        num_blocks=channel.num_blocks,
        draft_probs=channel.draft_probs,
    )


def _region_descriptor(region: RegionDescription) -> common_pb2.RegionDescriptor:
    return common_pb2.RegionDescriptor(
        name=region.name,
        kind=region.kind,
        handle=region.handle,
        offset=region.offset,
        shape=region.shape,
        dtype=region.dtype,
        device_uuid=region.device_uuid,
    )


def _admission(message: common_pb2.AdmitRequest) -> Admission:
    return Admission(
        request_id=message.request_id,
        epoch=message.epoch,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        max_total_len=message.max_total_len,
        sampling=_sampling(message.sampling),
    )


def _sampling(message: common_pb2.SamplingParams) -> SamplingSettings:
    seed = message.seed
    return SamplingSettings(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.top_p != 0 else 1.0,
        min_p=message.min_p,
        seed=seed - (1 << 64) if seed >= 1 << 63 else seed,
        seeded=message.seeded,
        repetition_penalty=message.repetition_penalty if message.repetition_penalty != 0 else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        num_logprobs=message.num_logprobs,
    )


def _step_request(message: common_pb2.StepPlan) -> StepRequest:
    return StepRequest(
        seq=message.seq,
        channel_id=message.channel_id,
        channel_epoch=message.channel_epoch,
        rows=tuple(
            RowRequest(
                row.request_id, row.epoch, row.context_len, row.query_len, row.verify_len, row.draft_len, row.samples
            )
            for row in message.rows
        ),
        drafts_from_seq=message.drafts_from_seq,
        deadline_ms=message.deadline_ms,
        ahead=message.ahead,
    )


def _capacity(capacity: Capacity) -> common_pb2.Capacity:
    return common_pb2.Capacity(free_seats=capacity.free_seats, free_blocks=capacity.free_blocks)


def _write_step_result(reply: StepReply, result: target_pb2.StepResult) -> None:
    """Filled in place, field by field: a message made by keywords and copied into another costs three times as much,
    and this is done for every row of every step.
    """
    times = reply.times
    result.seq = reply.seq
    result.capacity.free_seats = reply.capacity.free_seats
    result.capacity.free_blocks = reply.capacity.free_blocks
    result.wait_ms = times.wait_ms
    result.forward_ms = times.forward_ms
    result.verify_ms = times.verify_ms
    result.total_ms = times.total_ms
    result.launch_ms = times.launch_ms
    result.drafts_missed = reply.drafts_missed
    result.collective_ms = times.collective_ms
    for load in reply.rank_loads:
        result.ranks.add(num_tokens=load.num_tokens, attention_work=load.attention_work)
    add = result.rows.add
    for row in reply.rows:
        message = add()
        message.request_id = row.request_id
        message.epoch = row.epoch
        message.status = _ROW_STATUS[row.status]
        message.token_ids.extend(row.token_ids)
        message.num_accepted = row.num_accepted
        message.num_drafted = row.num_drafted
        message.context_len = row.context_len
        for item in row.logprobs:
            message.logprobs.add(logprob=item.logprob, top_ids=item.top_ids, top_logprobs=item.top_logprobs)


def _info(info: ServiceInfo) -> target_pb2.TargetInfo:
    return target_pb2.TargetInfo(
        instance_id=info.instance_id,
        model=info.model,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_seats=info.num_seats,
        max_step_tokens=info.max_step_tokens,
        eos_token_ids=info.eos_token_ids,
        max_verify_len=info.max_verify_len,
    )
