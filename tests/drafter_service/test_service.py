"""Does the whole service, in this process, do what a gateway and a target expect of it over real RPCs?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_service.assembly import make_info, make_speculator
from drafter_service.config import DrafterConfig
from drafter_service.server import DrafterServer
from engine.decoder import Decoder
from protos import common_pb2, drafter_pb2
from tests.drafter_service.fake_service import FakeTargetService, Gateway, fields_of
from tests.drafter_service.harness import prompt_of

EAGLE3: dict[str, Any] = {"method": "eagle3", "random_head": {"draft_vocab_size": 128}}


@pytest.fixture
def service(decoder: Decoder) -> Iterator[FakeTargetService]:
    service = FakeTargetService(decoder)
    yield service
    service.close()


@pytest.fixture
def start_drafter(tiny_directory: Path) -> Iterator[Callable[..., DrafterServer]]:
    servers: list[DrafterServer] = []

    def start(**settings: Any) -> DrafterServer:
        defaults = {"listen": "127.0.0.1:0", "block_size": 4, "check_integrity": True, "attach_timeout_s": 2.0}
        config = DrafterConfig.model_validate({**defaults, **settings})
        speculator = make_speculator(config, str(tiny_directory))
        servers.append(DrafterServer(config, make_info(config, speculator), speculator))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        failed = server.failed.is_set()
        server.stop()
        assert not failed


@pytest.fixture
def connect() -> Iterator[Callable[..., Gateway]]:
    gateways: list[Gateway] = []

    def connect(address: str, gateway_id: str = "gateway") -> Gateway:
        gateways.append(Gateway(address, gateway_id))
        return gateways[-1]

    yield connect
    for gateway in gateways:
        gateway.close()


@pytest.mark.parametrize("kind", ["shm", "bytes"])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_a_request_from_admission_to_release(
    service: FakeTargetService,
    start_drafter: Callable[..., DrafterServer],
    connect: Callable[..., Gateway],
    tiny_directory: Path,
    method: str,
    kind: str,
) -> None:
    settings: dict[str, Any] = {"method": method}
    if method == "eagle3":
        settings = EAGLE3
    elif method == "draft_model":
        settings["checkpoint"] = str(tiny_directory)
    gateway = connect(start_drafter(channel_kinds=(kind,), num_seats=4, **settings).address)
    assert gateway.info.method == method
    assert gateway.info.max_draft_len == 7
    opened = gateway.open(service.address)
    assert opened.ok, opened.detail
    assert opened.kind == kind
    assert opened.target_instance_id == "fake"
    target = service.targets[opened.channel_id]
    prompt = prompt_of(5, 1) * 4
    request = target.add("r", prompt)
    admitted = gateway.admit(**fields_of("r", prompt, opened.channel_id))
    assert admitted.status == common_pb2.ADMIT_STATUS_OK
    assert admitted.capacity.free_seats == 3
    for step in range(6):
        report = gateway.plan(target, draft_len=3, chunk=9)
        assert not report.missed
        assert report.seq == step + 1
        assert list(report.cold_request_ids) == []
        assert report.metadata_builds == (0 if method == "ngram" else 1)
    if method == "draft_model":
        assert request.num_accepted == request.num_drafted == 9
    gateway.send(release=common_pb2.Release(request_id="r", epoch=1))
    released = gateway.next("released").released
    assert released.capacity.free_seats == 4
    gateway.close()
    assert service.detached.get(timeout=10) == (opened.channel_id, opened.channel_epoch)


def test_two_gateways_and_two_targets_do_not_wait_for_each_other(
    decoder: Decoder,
    service: FakeTargetService,
    start_drafter: Callable[..., DrafterServer],
    connect: Callable[..., Gateway],
) -> None:
    drafter = start_drafter(method="ngram")
    slow, quick = connect(drafter.address, "slow"), connect(drafter.address, "quick")
    channels = [gateway.open(service.address) for gateway in (slow, quick)]
    assert channels[0].channel_id != channels[1].channel_id
    # A plan of the first whose entry does not come...
    slow.send(plan=common_pb2.StepPlan(seq=1, channel_id=channels[0].channel_id, channel_epoch=1, deadline_ms=9000))
    target = service.targets[channels[1].channel_id]
    target.add("r", prompt_of(3, 1) * 3)
    quick.admit(**fields_of("r", prompt_of(3, 1) * 3, channels[1].channel_id))
    for _ in range(5):
        report = quick.plan(target, 3)
        assert not report.missed
        assert report.total_ms < 5000
    # ...until it does.
    other = service.targets[channels[0].channel_id]
    other.channel.begin(1, 0, 0).query_start_loc.zero_()
    other.channel.publish(1)
    assert not slow.next("report").report.missed


def test_an_ended_stream_gives_everything_back(
    service: FakeTargetService, start_drafter: Callable[..., DrafterServer], connect: Callable[..., Gateway]
) -> None:
    drafter = start_drafter(num_seats=2, num_blocks=64, **EAGLE3)
    first = connect(drafter.address, "first")
    opened = first.open(service.address)
    target = service.targets[opened.channel_id]
    for name in ("a", "b"):
        target.add(name, prompt_of(9, 1))
        assert first.admit(**fields_of(name, prompt_of(9, 1), opened.channel_id)).status == 1
    full = first.admit(**fields_of("c", prompt_of(9, 1), opened.channel_id))
    assert full.status == common_pb2.ADMIT_STATUS_NO_SEAT
    assert first.plan(target, 3).num_drafted == 6
    first.close()
    service.detached.get(timeout=10)
    second = connect(drafter.address, "second")
    channel_id = second.open(service.address).channel_id
    admitted = second.admit(**fields_of("a", prompt_of(3, 2), channel_id))
    assert admitted.status == common_pb2.ADMIT_STATUS_OK
    assert (admitted.capacity.free_seats, admitted.capacity.free_blocks) == (1, 64)


def test_a_channel_opened_anew_replaces_the_old_one(
    service: FakeTargetService, start_drafter: Callable[..., DrafterServer], connect: Callable[..., Gateway]
) -> None:
    gateway = connect(start_drafter(method="ngram", num_seats=2).address)
    first = gateway.open(service.address)
    gateway.admit(**fields_of("r", [5, 6, 7], first.channel_id))
    second = gateway.open(service.address)
    assert second.ok
    assert (second.channel_id, second.channel_epoch) == (first.channel_id, first.channel_epoch + 1)
    assert service.detached.get(timeout=10) == (first.channel_id, first.channel_epoch)
    # What came through the old channel is gone.
    admitted = gateway.admit(**fields_of("s", [5, 6, 7], first.channel_id))
    assert admitted.capacity.free_seats == 1
    target = service.targets[second.channel_id]
    target.add("s", [5, 6, 7])
    assert not gateway.plan(target, 2).missed


def test_a_target_is_not_looked_for_behind_a_proxy(
    service: FakeTargetService,
    start_drafter: Callable[..., DrafterServer],
    connect: Callable[..., Gateway],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = connect(start_drafter(method="ngram", attach_timeout_s=5.0).address)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    opened = gateway.open(service.address)
    assert opened.ok, opened.detail


def test_what_cannot_be_opened_says_why(
    service: FakeTargetService, start_drafter: Callable[..., DrafterServer], connect: Callable[..., Gateway]
) -> None:
    drafter = start_drafter(method="ngram", attach_timeout_s=0.5)
    gateway = connect(drafter.address)
    for address, detail in (("127.0.0.1:1", "DEADLINE_EXCEEDED"), ("", "HOST:PORT")):
        opened = gateway.open(address)
        assert not opened.ok
        assert detail in opened.detail
    small = connect(start_drafter(max_step_tokens=16, **EAGLE3).address)
    opened = small.open(service.address)
    assert not opened.ok
    assert "drafter.max_step_tokens" in opened.detail
    reuse = connect(start_drafter(metadata_source="reuse", num_blocks=16, **EAGLE3).address)
    opened = reuse.open(service.address)
    assert not opened.ok
    assert "drafter.num_blocks" in opened.detail


def test_nonsense_is_answered_by_a_fault_and_the_stream_lives_on(
    service: FakeTargetService, start_drafter: Callable[..., DrafterServer], connect: Callable[..., Gateway]
) -> None:
    gateway = connect(start_drafter(**EAGLE3).address)
    gateway.send()
    assert gateway.next("fault").fault.kind == "protocol"
    gateway.send(plan=common_pb2.StepPlan(seq=1, channel_id="nobody's"))
    fault = gateway.next("fault").fault
    assert (fault.kind, fault.seq) == ("channel", 1)
    for seq in (0, 1 << 63):
        gateway.send(plan=common_pb2.StepPlan(seq=seq, channel_id="nobody's"))
        assert "seq: must be in 1.." in gateway.next("fault").fault.detail
    opened = gateway.open(service.address)
    twice = [common_pb2.RowPlan(request_id="r", epoch=1)] * 2
    gateway.send(plan=common_pb2.StepPlan(seq=1, channel_id=opened.channel_id, channel_epoch=1, rows=twice))
    assert "more than one row" in gateway.next("fault").fault.detail
    gateway.send(plan=common_pb2.StepPlan(seq=1, channel_id=opened.channel_id, channel_epoch=9))
    assert gateway.next("fault").fault.kind == "channel"
    good = fields_of("r", [5, 6, 7], opened.channel_id)
    for change, field in (
        ({"request_id": ""}, "request_id"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 512]}, "token_ids"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 4}, "prompt_len"),
        ({"max_total_len": 2}, "max_total_len"),
        ({"channel_id": "other"}, "channel_id"),
    ):
        admitted = gateway.admit(**{**good, **change})
        assert admitted.status == common_pb2.ADMIT_STATUS_INVALID
        assert admitted.field == field, admitted
    assert gateway.admit(**{**good, "epoch": 3}).status == common_pb2.ADMIT_STATUS_OK
    assert gateway.admit(**{**good, "epoch": 2}).field == "epoch"
    free = gateway.admit(**{**good, "epoch": 4}).capacity.free_seats
    gateway.send(release=common_pb2.Release(request_id="r", epoch=3))
    assert gateway.next("released").released.capacity.free_seats == free  # of an older epoch: dropped
    gateway.send(release=common_pb2.Release(request_id="r", epoch=4))
    assert gateway.next("released").released.capacity.free_seats == free + 1
    gateway.send(release=common_pb2.Release(request_id="never seen", epoch=1))
    gateway.next("released")


def test_commands_before_hello_are_refused(start_drafter: Callable[..., DrafterServer]) -> None:
    from protos import drafter_pb2_grpc

    with grpc.insecure_channel(start_drafter(method="ngram").address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        commands = [drafter_pb2.DrafterCommand(release=common_pb2.Release(request_id="r"))]
        events = list(stub.Serve(iter(commands), timeout=10))
    assert [event.fault.kind for event in events] == ["protocol"]


def test_health_and_reflection(start_drafter: Callable[..., DrafterServer]) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(start_drafter(method="ngram").address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "outrider.v1.DrafterService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        listed = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked), timeout=5))
        names = {item.name for item in listed.list_services_response.service}
    assert "outrider.v1.DrafterService" in names


def test_a_channel_that_comes_after_its_stream_has_ended_is_given_back(
    service: FakeTargetService, start_drafter: Callable[..., DrafterServer], connect: Callable[..., Gateway]
) -> None:
    gateway = connect(start_drafter(method="ngram").address)
    service.attaching.clear()
    gateway.send(open=drafter_pb2.OpenChannel(target_address=service.address))
    assert service.attach_asked.wait(10)
    gateway.close()
    assert gateway.ended()
    service.attaching.set()
    assert service.detached.get(timeout=10)[1] == 1
