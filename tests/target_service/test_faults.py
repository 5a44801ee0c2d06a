"""Nonsense is answered by a fault that names the field; the service lives on and no seat is lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.channel import host_id
from protos import common_pb2, target_pb2, target_pb2_grpc
from tests.target_service.gateway_client import Driver, Gateway
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import all_free, prompt_of
from tests.tiny_models import greedy_reference


def admission(**fields: Any) -> common_pb2.AdmitRequest:
    sampling = common_pb2.SamplingParams(**{"num_logprobs": -1, **fields.pop("sampling", {})})
    whole = {"request_id": "a", "epoch": 1, "token_ids": [5, 6, 7], "prompt_len": 3, "max_total_len": 20, **fields}
    return common_pb2.AdmitRequest(sampling=sampling, **whole)


def row(**fields: Any) -> common_pb2.RowPlan:
    whole = {"request_id": "a", "epoch": 1, "context_len": 0, "query_len": 3, "samples": True, **fields}
    return common_pb2.RowPlan(**whole)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 512, 7]}, "token_ids"),
        ({"token_ids": [5, 2**32 - 1]}, "token_ids"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 4}, "prompt_len"),
        ({"max_total_len": 3}, "max_total_len"),
        ({"max_total_len": 513}, "max_total_len"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
        ({"sampling": {"temperature": INF}}, "sampling.temperature"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"top_p": -0.1}}, "sampling.top_p"),
        ({"sampling": {"min_p": 2}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": -1}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": NAN}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": INF}}, "sampling.frequency_penalty"),
        ({"sampling": {"logit_bias": {512: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {5: NAN}}}, "sampling.logit_bias"),
        ({"sampling": {"num_logprobs": -2}}, "sampling.num_logprobs"),
        ({"sampling": {"num_logprobs": 513}}, "sampling.num_logprobs"),
    ],
)
def test_impossible_admissions(target_address: str, fields: dict[str, Any], field: str) -> None:
    with Gateway(target_address) as gateway:
        reply = gateway.admit(admission(**fields))
        assert (reply.status, reply.field) == (common_pb2.ADMIT_STATUS_INVALID, field)
        assert reply.detail
        assert all_free(gateway)


# Plans for the request "a": [5, 6, 7] admitted and not run yet.
@pytest.mark.parametrize(
    ("plan", "field"),
    [
        ({"seq": 0, "rows": [row()]}, "seq"),
        ({"rows": [row(query_len=0)]}, "rows[0].query_len"),
        ({"rows": [row(query_len=4)]}, "rows[0].query_len"),
        ({"rows": [row(query_len=513)]}, "rows.query_len"),
        ({"rows": [row(query_len=2**32 - 1)]}, "rows[0].context_len"),
        ({"rows": [row(), row(request_id="b", query_len=510)]}, "rows.query_len"),
        ({"rows": [row(), row()]}, "rows[1].request_id"),
        ({"rows": [row(request_id="")]}, "rows[0].request_id"),
        ({"rows": [row(context_len=1, query_len=2)]}, "rows[0].context_len"),
        ({"rows": [row(context_len=5000)]}, "rows[0].context_len"),
        ({"rows": [row(query_len=2)]}, "rows[0].samples"),
        ({"rows": [row(samples=False)]}, "rows[0].samples"),
        ({"rows": [row(query_len=3, verify_len=2)]}, "rows[0].verify_len"),
        ({"rows": [row(query_len=9, verify_len=8)]}, "rows[0].verify_len"),
        ({"rows": [row(query_len=3, verify_len=1)]}, "rows[0].query_len"),
        ({"rows": [row(request_id=f"r{n}") for n in range(33)]}, "rows"),
        ({"rows": [row()], "drafts_from_seq": 1}, "drafts_from_seq"),
    ],
)
def test_impossible_plans(target_address: str, reference: PreTrainedModel, plan: dict[str, Any], field: str) -> None:
    with Gateway(target_address) as gateway:
        gateway.admit(admission())
        whole = {"seq": 1, **plan}
        fault = gateway.fault(plan=common_pb2.StepPlan(**whole))
        assert (fault.kind, fault.seq) == ("invalid_request", whole["seq"])
        assert fault.detail.startswith(f"{field}: "), fault
        # The request stands where it stood.
        result = gateway.plan(common_pb2.StepPlan(seq=2 if whole["seq"] else 1, rows=[row()]))
        assert list(result.rows[0].token_ids) == greedy_reference(reference, [5, 6, 7], 1)
        gateway.release("a")
        assert all_free(gateway)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"context_len": 2}, "rows[0].context_len"),
        ({"context_len": 4}, "rows[0].context_len"),
        ({"query_len": 2}, "rows[0].query_len"),
        ({"samples": False}, "rows[0].samples"),
    ],
)
def test_decode_rows_that_do_not_continue(target_address: str, fields: dict[str, Any], field: str) -> None:
    with Gateway(target_address) as gateway:
        gateway.admit(admission())
        gateway.plan(common_pb2.StepPlan(seq=1, rows=[row()]))
        decode = {"context_len": 3, "query_len": 1, **fields}
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=2, rows=[row(**decode)]))
        assert fault.detail.startswith(f"{field}: "), fault
        good = row(context_len=3, query_len=1)
        assert gateway.plan(common_pb2.StepPlan(seq=3, rows=[good])).rows[0].context_len == 4


def test_a_request_at_its_length_limit_runs_no_further(target_address: str) -> None:
    with Gateway(target_address) as gateway:
        gateway.admit(admission(max_total_len=4))
        assert len(gateway.plan(common_pb2.StepPlan(seq=1, rows=[row()])).rows[0].token_ids) == 1
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=2, rows=[row(context_len=3, query_len=1)]))
        assert "max_total_len" in fault.detail


def test_step_numbers(target_address: str) -> None:
    with Gateway(target_address) as gateway:
        assert gateway.plan(common_pb2.StepPlan(seq=5)).seq == 5  # begins anywhere
        for wrong in (5, 4, 7, 1):
            fault = gateway.fault(plan=common_pb2.StepPlan(seq=wrong))
            assert (fault.seq, fault.kind) == (wrong, "invalid_request")
            assert fault.detail == f"seq: {wrong}, but 6 is next"
        assert gateway.plan(common_pb2.StepPlan(seq=6)).seq == 6
        # With another channel it may begin again.
        assert gateway.plan(common_pb2.StepPlan(seq=1, channel_id="elsewhere", channel_epoch=3)).seq == 1
        assert gateway.plan(common_pb2.StepPlan(seq=2, channel_id="elsewhere", channel_epoch=3)).seq == 2


def test_a_step_number_too_big_for_the_ring_is_refused(target_address: str) -> None:
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address) as drafter:
        channel = {"channel_id": drafter.channel_id, "channel_epoch": drafter.channel_epoch}
        gateway.admit(admission())
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=1 << 63, rows=[row()], **channel))
        assert (fault.kind, fault.seq) == ("invalid_request", 1 << 63)
        assert fault.detail.startswith("seq: ")
        assert gateway.plan(common_pb2.StepPlan(seq=1, rows=[row()])).rows[0].context_len == 3


def test_a_channel_that_is_not_there_costs_only_drafts(target_address: str, reference: PreTrainedModel) -> None:
    with Gateway(target_address) as gateway:
        gateway.admit(admission())
        fields: dict[str, Any] = {"channel_id": "nowhere", "channel_epoch": 9, "deadline_ms": 5000}
        first = gateway.plan(common_pb2.StepPlan(seq=1, rows=[row()], **fields))
        decode = row(context_len=3, query_len=4, verify_len=3)
        second = gateway.plan(common_pb2.StepPlan(seq=2, rows=[decode], drafts_from_seq=1, **fields))
        assert second.drafts_missed
        assert second.wait_ms < 1000
        tokens = [*first.rows[0].token_ids, *second.rows[0].token_ids]
        assert tokens == greedy_reference(reference, [5, 6, 7], 2)


def test_hello_comes_first_and_once(target_address: str) -> None:
    with Gateway(target_address, hello=False) as gateway:
        for command in (
            {"admit": admission()},
            {"plan": common_pb2.StepPlan(seq=1)},
            {"release": common_pb2.Release(request_id="a", epoch=1)},
        ):
            fault = gateway.fault(**command)
            assert (fault.kind, fault.detail.split(":")[0]) == ("protocol", "hello")
        gateway.send(hello=target_pb2.TargetHello(gateway_id="late"))
        gateway.info = gateway.event("info")
        assert gateway.fault(hello=target_pb2.TargetHello(gateway_id="again")).detail.startswith("hello: ")
        assert gateway.fault().detail.startswith("command: ")
        assert all_free(gateway)


def test_no_seat_is_not_an_error(target_address: str) -> None:
    with Gateway(target_address) as gateway:
        num_seats = gateway.info.num_seats
        replies = [gateway.admit(admission(request_id=f"r{n}")) for n in range(num_seats + 1)]
        assert [reply.status for reply in replies[:-1]] == [common_pb2.ADMIT_STATUS_OK] * num_seats
        assert replies[-1].status == common_pb2.ADMIT_STATUS_NO_SEAT
        assert replies[-1].capacity.free_seats == 0
        gateway.release("r0")
        assert gateway.admit(admission(request_id="last")).status == common_pb2.ADMIT_STATUS_OK


MIRRORS: dict[str, Any] = {"metadata_source": "reuse", "block_size": 16, "num_blocks": 64}


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"drafter_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "drafter_id"),
        ({"drafter_id": "d" * 101}, grpc.StatusCode.INVALID_ARGUMENT, "drafter_id"),
        ({"max_draft_len": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_draft_len"),
        ({"max_draft_len": 2**31}, grpc.StatusCode.INVALID_ARGUMENT, "max_draft_len"),
        ({"hidden_layers": [0, 3]}, grpc.StatusCode.INVALID_ARGUMENT, "hidden_layers"),
        ({"hidden_layers": [0] * 4}, grpc.StatusCode.INVALID_ARGUMENT, "hidden_layers"),
        ({"vocab_size": 513}, grpc.StatusCode.INVALID_ARGUMENT, "vocab_size"),
        ({"metadata_source": "guess"}, grpc.StatusCode.INVALID_ARGUMENT, "metadata_source"),
        (MIRRORS | {"block_size": 8}, grpc.StatusCode.INVALID_ARGUMENT, "block_size"),
        (MIRRORS | {"block_size": 0}, grpc.StatusCode.INVALID_ARGUMENT, "block_size"),
        (MIRRORS | {"num_blocks": 63}, grpc.StatusCode.INVALID_ARGUMENT, "num_blocks"),
        ({"kinds": []}, grpc.StatusCode.FAILED_PRECONDITION, "kinds"),
        ({"kinds": ["cuda_ipc"]}, grpc.StatusCode.FAILED_PRECONDITION, "kinds"),
        ({"kinds": ["shm"], "host_id": "elsewhere"}, grpc.StatusCode.FAILED_PRECONDITION, "kinds"),
    ],
)
def test_impossible_attachments(
    target_address: str, fields: dict[str, Any], status: grpc.StatusCode, field: str
) -> None:
    whole: dict[str, Any] = {"drafter_id": "d", "host_id": host_id(), "kinds": ["shm"], "max_draft_len": 3, **fields}
    with grpc.insecure_channel(target_address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.Attach(target_pb2.AttachRequest(**whole), timeout=10)
        assert error.value.code() == status
        assert (error.value.details() or "").startswith(f"{field}: ")
        stub.Detach(target_pb2.DetachRequest(channel_id="nothing", epoch=1), timeout=10)


def test_the_best_kind_that_works_is_taken(target_address: str) -> None:
    with grpc.insecure_channel(target_address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.AttachRequest(
            drafter_id="far", host_id="elsewhere", kinds=["cuda_ipc", "shm", "bytes"], max_draft_len=3
        )
        reply = stub.Attach(request, timeout=10)
        assert reply.channel.kind == "bytes"
        first = target_pb2.ReplyEntry(channel_id=reply.channel.channel_id, epoch=reply.channel.epoch + 1)
        with pytest.raises(grpc.RpcError) as error:
            next(stub.Exchange(iter([first]), timeout=10))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        stub.Detach(target_pb2.DetachRequest(channel_id=reply.channel.channel_id, epoch=reply.channel.epoch))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    commands=st.lists(
        st.one_of(
            st.builds(
                lambda **f: {"plan": common_pb2.StepPlan(**f)},
                seq=st.integers(0, 4),
                drafts_from_seq=st.integers(0, 4),
                rows=st.lists(
                    st.builds(
                        common_pb2.RowPlan,
                        request_id=st.sampled_from(["a", "b", "c", ""]),
                        epoch=st.integers(0, 2),
                        context_len=st.integers(0, 40),
                        query_len=st.integers(0, 9),
                        verify_len=st.integers(0, 9),
                        samples=st.booleans(),
                    ),
                    max_size=4,
                ),
            ),
            st.builds(
                lambda **f: {"admit": common_pb2.AdmitRequest(**f)},
                request_id=st.sampled_from(["a", "b", "c", ""]),
                epoch=st.integers(0, 2),
                token_ids=st.lists(st.integers(0, 520), max_size=6),
                prompt_len=st.integers(0, 4),
                max_total_len=st.integers(0, 30),
            ),
            st.builds(
                lambda **f: {"release": common_pb2.Release(**f)},
                request_id=st.sampled_from(["a", "b", "c"]),
                epoch=st.integers(0, 2),
            ),
        ),
        max_size=12,
    )
)
def test_any_commands_at_all(target_address: str, commands: list[dict[str, Any]]) -> None:
    """Each is answered, none is called internal, and everything is free when the stream ends."""
    with Gateway(target_address) as gateway:
        for command in commands:
            gateway.send(**command)
            event = gateway.any_event()
            assert event.WhichOneof("event") in {"admitted", "result", "released", "fault"}
            assert event.fault.kind in {"", "invalid_request"}, event
        gateway.half_close()
    with Gateway(target_address) as gateway:
        assert all_free(gateway)


def test_the_driver_itself_is_checked(target_address: str) -> None:
    """A driver that plans what was not admitted hears UNKNOWN, so that the tests above mean something."""
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(3), 2)
        assert driver.step([running]).rows[0].status == target_pb2.ROW_STATUS_UNKNOWN
