"""Does the device thread serve device channels: enqueue at once, report when done, give everything back?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drafter_service.channels import AttachedChannel, AttachOutcome
from drafter_service.core import DrafterCore
from drafter_service.device import making
from drafter_service.device.completion import Completions, Pending
from drafter_service.device.making import make_device_steps, make_program
from drafter_service.device_thread import DeviceThread, is_device_error
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import (
    Admission,
    AdmissionReply,
    ChannelReply,
    Hello,
    ReleaseReply,
    ReleaseRequest,
    RowRequest,
    ServiceInfo,
    StepReport,
    StepRequest,
)
from drafter_service.ngram import NgramSpeculator
from drafter_service.streams import GatewayStream, Inboxes
from engine.decoder import Decoder
from engine.device_deadline import DeviceDeadline
from engine.outbox import Outbox
from tests.drafter_service.conftest import LAYERS
from tests.drafter_service.device.harness import ALL_SIZES
from tests.drafter_service.fake_target import FakeRequest, FakeTarget
from tests.drafter_service.harness import prompt_of

MakeEagle3 = Callable[..., Eagle3Speculator]


class _Held:
    """A step that waits for the test."""

    def __init__(self, go_on: threading.Semaphore) -> None:
        self._go_on = go_on

    def wait(self) -> None:
        assert self._go_on.acquire(timeout=20)


class SlowDevice(Completions):
    """A device on which a step is done only when the test says so."""

    made: list[SlowDevice]

    def __init__(self, on_done: Callable[[], None], deadline: DeviceDeadline) -> None:
        super().__init__(on_done, deadline)
        self.go_on = threading.Semaphore(0)
        SlowDevice.made.append(self)

    def add(self, step: Pending) -> None:
        super().add(_Held(self.go_on))


class Service:
    """A device thread with one stream and one channel."""

    def __init__(self, target: FakeTarget, speculator: Eagle3Speculator, deadline_s: float | None = None) -> None:
        self.target = target
        self.inboxes = Inboxes(64)
        self.deadline = DeviceDeadline(deadline_s, lambda reason: self.device.lose(reason))
        info = ServiceInfo("instance", "drafter", speculator.method, 7, "0", 512)
        program = make_program(speculator, ALL_SIZES)
        self.core = DrafterCore(
            info,
            speculator,
            speculator.settings.num_seats,
            5.0,
            lambda *_: None,
            lambda residents: make_device_steps(
                program, speculator.needs, residents, 5.0, self.inboxes.nudge, self.deadline
            ),
        )
        self.device = DeviceThread(self.core, self.inboxes, None, check_integrity=True, deadline=self.deadline)
        self.stream = GatewayStream(1, Outbox(64, on_overflow=lambda: None))
        self.detached = threading.Event()
        assert target.local is not None
        end = target.local.drafter

        def detach() -> None:
            end.close()
            self.detached.set()

        self.device.start()
        self.submit(Hello("gateway"))
        assert isinstance(self.event(), ServiceInfo)
        self.submit(AttachOutcome("a:1", AttachedChannel(end, "a:1", "instance", target.max_len, detach)))
        reply = self.event()
        assert isinstance(reply, ChannelReply)
        assert reply.ok, reply.detail

    def submit(self, command: Any) -> None:
        assert self.device.submit(self.stream, command)

    def event(self, deadline_s: float = 10.0) -> object:
        return self.stream.outbox.take(deadline_s)

    def admit(self, name: str, prompt: list[int]) -> FakeRequest:
        request = self.target.add(name, prompt)
        spec = self.target.spec
        self.submit(Admission(name, 1, tuple(prompt), len(prompt), self.target.max_len, spec.channel_id))
        assert isinstance(self.event(), AdmissionReply)
        return request

    def step(self, draft_len: int) -> int:
        """The target runs a step, and its plan is sent."""
        rows = self.target.plan_rows(list(self.target.requests.values()), 64)
        plan_rows = tuple(
            RowRequest(row.request.request_id, 1, draft_len, row.request.context_len, len(row.query)) for row in rows
        )
        seq = self.target.step(rows)
        self.submit(StepRequest(seq, self.target.spec.channel_id, self.target.spec.epoch, plan_rows, 1000, ahead=2))
        return seq

    def close(self) -> None:
        self.device.stop(10.0)
        self.target.close()


@pytest.fixture
def serve(make_eagle3: MakeEagle3, decoder: Decoder) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(deadline_s: float | None = None) -> Service:
        made.append(Service(FakeTarget(decoder, LAYERS, kind="local"), make_eagle3(), deadline_s))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> type[SlowDevice]:
    SlowDevice.made = []
    monkeypatch.setattr(making, "Completions", SlowDevice)
    return SlowDevice


def test_steps_are_reported_when_they_are_done(serve: Callable[..., Service]) -> None:
    service = serve()
    service.admit("r", prompt_of(6, 1))
    for _ in range(4):
        seq = service.step(3)
        report = service.event()
        assert isinstance(report, StepReport)
        assert (report.seq, report.num_drafted, report.missed) == (seq, 3, False)
        assert report.capacity.free_seats == 15
    assert not service.device.failed.is_set()


def test_plans_are_enqueued_while_earlier_ones_run(
    serve: Callable[..., Service], slow_device: type[SlowDevice]
) -> None:
    """The reply of the third step is there before the first is done, and commands between them are answered."""
    service = serve()
    request = service.admit("r", prompt_of(6, 1))
    for _ in range(3):
        seq = service.step(3)
        wait_for_reply(service, seq)
        request.drafts = []
    service.submit(ReleaseRequest("r", 1))
    assert isinstance(service.event(), ReleaseReply)
    assert service.event(0.05) is None
    for _ in range(3):
        slow_device.made[0].go_on.release()
    seqs = [event.seq for _ in range(3) if isinstance(event := service.event(), StepReport)]
    assert seqs == [1, 2, 3]


def wait_for_reply(service: Service, seq: int) -> None:
    """Until the device thread has enqueued the step's reply (on a CPU: has run it)."""
    pause = threading.Event()
    for _ in range(400):
        if service.target.channel.take_reply(seq, 0.0) is not None:
            return
        pause.wait(0.01)
    raise AssertionError(f"no reply to step {seq}")


def test_a_stream_that_ends_with_steps_under_way(serve: Callable[..., Service], slow_device: type[SlowDevice]) -> None:
    service = serve()
    service.admit("r", prompt_of(6, 1))
    for _ in range(2):
        wait_for_reply(service, service.step(3))
    service.stream.outbox.close()
    service.device.end_stream(service.stream)
    assert service.detached.wait(5.0)
    for _ in range(2):
        slow_device.made[0].go_on.release()
    service.device.stop(10.0)
    assert not service.device.failed.is_set()
    assert service.device.num_resident() == 0
    service.core.check_integrity()


def test_a_device_that_fails_ends_the_thread(
    serve: Callable[..., Service], slow_device: type[SlowDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    service.admit("r", prompt_of(6, 1))

    def broken(self: SlowDevice, step: Pending) -> None:
        class Broken:
            """A step on a device whose context is gone."""

            def wait(self) -> None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

        Completions.add(self, Broken())

    monkeypatch.setattr(SlowDevice, "add", broken)
    service.step(3)
    assert service.device.failed.wait(5.0)


def test_a_device_that_never_comes_back_is_lost(serve: Callable[..., Service], slow_device: type[SlowDevice]) -> None:
    """Whoever waits for it is stuck, and the service ends all the same: the process can."""
    service = serve(deadline_s=2.0)
    service.admit("r", prompt_of(6, 1))
    wait_for_reply(service, service.step(3))
    assert service.device.failed.wait(10.0)
    assert service.device.device_error == "a step is not done after 2 s"
    assert not service.device.submit(service.stream, ReleaseRequest("r", 1))
    slow_device.made[0].go_on.release()


def test_which_errors_are_the_device_s() -> None:
    assert is_device_error(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_device_error(RuntimeError("shapes do not match"))
    assert not is_device_error(ValueError("CUDA error"))


def test_a_drafter_on_the_host_refuses_a_device_channel(decoder: Decoder) -> None:
    target = FakeTarget(decoder, (), kind="local")
    assert target.local is not None
    end = target.local.drafter
    core = DrafterCore(ServiceInfo("i", "d", "ngram", 7, "0", 0), NgramSpeculator(1, 3, 7), 2, 1.0, lambda *_: None)
    stream = GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    core.run(stream, Hello("gateway"), 0, 0.0)
    core.run(stream, AttachOutcome("a:1", AttachedChannel(end, "a:1", "i", 256, end.close)), 0, 0.0)
    stream.outbox.take(0.0)
    reply = stream.outbox.take(0.0)
    assert isinstance(reply, ChannelReply)
    assert not reply.ok
    assert "ngram" in reply.detail
    assert end.closed
    assert torch.device("cpu") == end.device
