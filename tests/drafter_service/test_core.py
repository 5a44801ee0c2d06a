"""Does a stream that ends between any two of its commands give everything back, and hold up nobody?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from drafter_service.channels import AttachedChannel, AttachOutcome
from drafter_service.core import DrafterCore
from drafter_service.device_thread import DeviceThread
from drafter_service.messages import Admission, Hello, OpenChannel, RowRequest, ServiceInfo, StepRequest
from drafter_service.ngram import NgramSpeculator
from drafter_service.streams import GatewayStream, Inboxes, StreamEnded
from engine.channel.opening import attach_drafter_channel
from engine.decoder import Decoder
from engine.outbox import Outbox
from tests.drafter_service.fake_target import FakeTarget

MakeTarget = Callable[[], FakeTarget]


@pytest.fixture
def make_target(decoder: Decoder) -> Iterator[MakeTarget]:
    made: list[FakeTarget] = []

    def make() -> FakeTarget:
        made.append(FakeTarget(decoder, (), channel_id=f"fake/{len(made)}"))
        return made[-1]

    yield make
    for target in made:
        target.close()


def make_core() -> DrafterCore:
    speculator = NgramSpeculator(1, 3, 7)
    info = ServiceInfo("instance", "drafter", speculator.method, 7, "0", 0)
    return DrafterCore(info, speculator, num_seats=2, max_wait_s=30.0, start_attach=lambda *_: None)


def attached(target: FakeTarget, address: str, detached: list[str]) -> AttachedChannel:
    channel = attach_drafter_channel(target.describe())

    def detach() -> None:
        channel.close()
        detached.append(address)

    return AttachedChannel(channel, address, "instance", target.max_len, detach)


def greeted(core: DrafterCore, stream_id: int = 1) -> GatewayStream:
    stream = GatewayStream(stream_id, Outbox(16, on_overflow=lambda: None))
    core.run(stream, Hello("gateway"), 0, 0.0)
    return stream


def admission(target: FakeTarget) -> Admission:
    return Admission("r", 1, (5, 6, 7), 3, 20, target.spec.channel_id)


def plan_of(target: FakeTarget) -> StepRequest:
    return StepRequest(1, target.spec.channel_id, target.spec.epoch, (RowRequest("r", 1, 2),), 2000)


def test_a_channel_is_taken_once_while_a_step_is_waited_for(make_target: MakeTarget) -> None:
    """The step was dropped with its broken stream; what comes after it must not be carried out again and again."""
    first, second = make_target(), make_target()
    core, detached = make_core(), list[str]()
    stream = greeted(core)
    assert core.run(stream, AttachOutcome("a:1", attached(first, "a:1", detached)), 0, 0.0)
    assert core.run(stream, admission(first), 0, 0.0)
    assert not core.run(stream, plan_of(first), 0, 0.0)
    assert core.run(stream, AttachOutcome("b:1", attached(second, "b:1", detached)), 0, 0.0)
    assert core.run(stream, StreamEnded(), 0, 0.0)
    assert sorted(detached) == ["a:1", "b:1"]
    assert not len(core.residents)


def test_a_channel_that_comes_after_the_stream_s_end_is_given_back(make_target: MakeTarget) -> None:
    target = make_target()
    core, detached = make_core(), list[str]()
    stream = greeted(core)
    core.run(stream, StreamEnded(), 0, 0.0)
    assert core.run(stream, AttachOutcome("a:1", attached(target, "a:1", detached)), 0, 0.0)
    assert detached == ["a:1"]
    assert not len(core.links)


def test_a_channel_asked_for_anew_hurries_the_steps_of_the_old_one(make_target: MakeTarget) -> None:
    """The gateway has given the old one up, perhaps because the step before it failed: nothing comes there any more."""
    target = make_target()
    inboxes, stream = Inboxes(16), GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    for command in (plan_of(target), admission(target)):
        inboxes.put(stream, command, 0.0)
    assert inboxes.later_plans(stream, target.spec.channel_id) == 0
    inboxes.put(stream, OpenChannel("a:1"), 0.0)
    assert inboxes.later_plans(stream, target.spec.channel_id) == 1


def test_what_a_broken_stream_has_waiting_is_not_carried_out(make_target: MakeTarget) -> None:
    """gRPC may tell a broken stream's end as if the gateway had said goodbye; its steps are not waited for even so."""
    target = make_target()
    core, inboxes, detached = make_core(), Inboxes(16), list[str]()
    device = DeviceThread(core, inboxes, None)
    stream = GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    gone = threading.Event()
    channel = attached(target, "a:1", detached)
    device.start()
    for command in (Hello("g"), AttachOutcome("a:1", replace(channel, detach=gone.set)), admission(target)):
        assert device.submit(stream, command)
    for _ in range(3):
        assert stream.outbox.take(5.0) is not None
    assert device.submit(stream, plan_of(target))
    stream.outbox.close()
    device.end_stream(stream)
    assert gone.wait(1.0)
    device.stop(5.0)
    channel.detach()
    assert not len(core.residents)
