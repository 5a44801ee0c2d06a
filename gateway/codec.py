"""How do the gateway's values look on the wire to and from the services?

Pure translation between `messages` and the protobuf of outrider.v1. What comes from a service is checked for being
there at all; what it means is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.generation import TokenLogprob
from gateway.messages import (
    AdmitStatus,
    Admitted,
    BadEvent,
    Capacity,
    ChannelOpened,
    DrafterEvent,
    DrafterInfo,
    DraftReport,
    Fault,
    Placement,
    Released,
    RowStatus,
    StepPlan,
    StepResult,
    TargetEvent,
    TargetInfo,
    Verdict,
)
from protos import common_pb2, drafter_pb2, target_pb2

_ADMIT_STATUS = {
    common_pb2.ADMIT_STATUS_OK: AdmitStatus.OK,
    common_pb2.ADMIT_STATUS_NO_SEAT: AdmitStatus.NO_SEAT,
    common_pb2.ADMIT_STATUS_INVALID: AdmitStatus.INVALID,
}
_ROW_STATUS = {
    target_pb2.ROW_STATUS_OK: RowStatus.OK,
    target_pb2.ROW_STATUS_STARVED: RowStatus.STARVED,
    target_pb2.ROW_STATUS_UNKNOWN: RowStatus.UNKNOWN,
    target_pb2.ROW_STATUS_SKIPPED: RowStatus.SKIPPED,
}


# To the services.


def placement_message(placement: Placement) -> common_pb2.AdmitRequest:
    """One `AdmitRequest`."""
    options = placement.sampling
    return common_pb2.AdmitRequest(
        request_id=placement.request_id,
        epoch=placement.epoch,
        token_ids=placement.token_ids,
        prompt_len=placement.prompt_len,
        max_total_len=placement.max_total_len,
        channel_id=placement.channel_id,
        mid_stream=placement.mid_stream,
        sampling=common_pb2.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=placement.seed,
            seeded=placement.seeded,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            num_logprobs=options.num_logprobs,
        ),
    )


def fill_plan(message: common_pb2.StepPlan, plan: StepPlan) -> None:
    """Write `plan` into an empty `StepPlan` message in place, as target and drafter commands carry the same."""
    message.seq = plan.seq
    message.channel_id = plan.channel_id
    message.channel_epoch = plan.channel_epoch
    message.drafts_from_seq = plan.drafts_from_seq
    message.deadline_ms = plan.deadline_ms
    message.ahead = plan.ahead
    add = message.rows.add
    for row in plan.rows:
        add(
            request_id=row.request_id,
            epoch=row.epoch,
            context_len=row.context_len,
            query_len=row.query_len,
            verify_len=row.verify_len,
            draft_len=row.draft_len,
            samples=row.samples,
        )


# From the services.


def capacity_value(message: common_pb2.Capacity) -> Capacity:
    """One `Capacity`."""
    return Capacity(message.free_seats, message.free_blocks)


def admitted_value(message: common_pb2.Admitted) -> Admitted:
    """One `Admitted`. Raises BadEvent at a status that is not known."""
    status = _ADMIT_STATUS.get(message.status)
    if status is None:
        raise BadEvent(f"admitted.status: {message.status} is not known")
    capacity = capacity_value(message.capacity)
    return Admitted(
        message.request_id, message.epoch, status, message.cached_len, message.field, message.detail, capacity
    )


def released_value(message: common_pb2.Released) -> Released:
    """One `Released`."""
    return Released(message.request_id, message.epoch, capacity_value(message.capacity))


def _logprob_values(token_ids: Iterable[int], messages: Iterable[target_pb2.TokenLogprobs]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token_id, message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=False)))
        for token_id, message in zip(token_ids, messages, strict=True)
    )


def _verdict_value(message: target_pb2.RowResult) -> Verdict:
    status = _ROW_STATUS.get(message.status)
    if status is None:
        raise BadEvent(f"result.rows.status: {message.status} is not known")
    token_ids = tuple(message.token_ids)
    if message.logprobs and len(message.logprobs) != len(token_ids):
        raise BadEvent(f"result.rows.logprobs: {len(message.logprobs)} for {len(token_ids)} tokens")
    return Verdict(
        message.request_id,
        message.epoch,
        status,
        token_ids,
        message.num_accepted,
        message.num_drafted,
        message.context_len,
        _logprob_values(token_ids, message.logprobs) if message.logprobs else (),
    )


def step_result_value(message: target_pb2.StepResult) -> StepResult:
    """One `StepResult`."""
    return StepResult(
        message.seq,
        tuple([_verdict_value(row) for row in message.rows]),
        capacity_value(message.capacity),
        message.wait_ms,
        message.forward_ms,
        message.verify_ms,
        message.total_ms,
        message.drafts_missed,
        message.collective_ms,
        tuple([(rank.num_tokens, rank.attention_work) for rank in message.ranks]),
    )


def target_event_value(message: target_pb2.TargetEvent) -> TargetEvent:
    """One event of `TargetService.Serve`. Raises BadEvent."""
    match message.WhichOneof("event"):
        case "result":
            return step_result_value(message.result)
        case "admitted":
            return admitted_value(message.admitted)
        case "released":
            return released_value(message.released)
        case "info":
            return _target_info_value(message.info)
        case "fault":
            fault = message.fault
            return Fault(fault.kind, fault.detail, fault.seq, fault.request_id)
        case other:
            raise BadEvent(f"target event {other!r} is not known")


def _target_info_value(info: target_pb2.TargetInfo) -> TargetInfo:
    for field in ("vocab_size", "max_model_len", "block_size", "num_blocks", "num_seats", "max_step_tokens"):
        if not getattr(info, field):
            raise BadEvent(f"info.{field}: must not be 0")
    return TargetInfo(
        info.instance_id,
        info.model,
        info.vocab_size,
        info.max_model_len,
        info.block_size,
        info.num_blocks,
        info.num_seats,
        info.max_step_tokens,
        frozenset(info.eos_token_ids),
        info.max_verify_len,
    )


def _report_value(report: drafter_pb2.DraftReport) -> DraftReport:
    return DraftReport(
        report.seq,
        report.channel_id,
        report.missed,
        tuple(report.cold_request_ids),
        report.num_drafted,
        report.wait_ms,
        report.prefill_ms,
        report.draft_ms,
        report.total_ms,
    )


def drafter_event_value(message: drafter_pb2.DrafterEvent) -> DrafterEvent:
    """One event of `DrafterService.Serve`. Raises BadEvent."""
    match message.WhichOneof("event"):
        case "report":
            return _report_value(message.report)
        case "admitted":
            return admitted_value(message.admitted)
        case "released":
            return released_value(message.released)
        case "info":
            info = message.info
            return DrafterInfo(
                info.instance_id, info.drafter_id, info.method, info.max_draft_len, info.version, info.vocab_size
            )
        case "opened":
            opened = message.opened
            return ChannelOpened(
                opened.target_address,
                opened.ok,
                opened.channel_id,
                opened.channel_epoch,
                opened.kind,
                opened.target_instance_id,
                opened.detail,
            )
        case "fault":
            fault = message.fault
            return Fault(fault.kind, fault.detail, fault.seq, fault.request_id)
        case other:
            raise BadEvent(f"drafter event {other!r} is not known")
