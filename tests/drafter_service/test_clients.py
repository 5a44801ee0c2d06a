"""Does whoever asks for channels without end get an answer, rather than a place in a queue without end?"""

from __future__ import annotations

import threading

import pytest

from drafter_service.channels import AttachedChannel, AttachOutcome
from drafter_service.clients import MAX_ATTACHES, TargetConnector
from drafter_service.speculator import ChannelNeeds
from drafter_service.streams import GatewayStream
from engine.errors import ChannelError
from engine.outbox import Outbox


def test_attaches_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = TargetConnector(ChannelNeeds(), "drafter", "instance", ("shm",), 5.0, 2.0)
    stream = GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    outcomes: list[AttachOutcome] = []
    let_go = threading.Event()

    def attach(gateway_id: str, target_address: str) -> AttachedChannel:
        let_go.wait(10.0)
        raise ChannelError("nobody there")

    def submit(stream: GatewayStream, outcome: AttachOutcome) -> bool:
        outcomes.append(outcome)
        return True

    monkeypatch.setattr(connector, "attach", attach)
    try:
        for index in range(MAX_ATTACHES + 1):
            connector.start_attach(stream, f"target:{index}", submit)
        (refused,) = outcomes
        assert refused.target_address == f"target:{MAX_ATTACHES}"
        assert "under way" in refused.detail
    finally:
        let_go.set()
        connector.close()
    assert [outcome.detail for outcome in outcomes[1:]] == ["nobody there"] * MAX_ATTACHES


def test_an_attach_that_fails_in_an_unforeseen_way_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = TargetConnector(ChannelNeeds(), "drafter", "instance", ("shm",), 5.0, 2.0)
    stream = GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    outcomes: list[AttachOutcome] = []

    def attach(gateway_id: str, target_address: str) -> AttachedChannel:
        raise RuntimeError("CUDA error: out of luck")

    def submit(stream: GatewayStream, outcome: AttachOutcome) -> bool:
        outcomes.append(outcome)
        return True

    monkeypatch.setattr(connector, "attach", attach)
    connector.start_attach(stream, "target:1", submit)
    connector.close()
    assert outcomes == [AttachOutcome("target:1", None, "RuntimeError: CUDA error: out of luck")]


def test_an_attach_that_has_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = TargetConnector(ChannelNeeds(), "drafter", "instance", ("shm",), 5.0, 2.0)
    stream = GatewayStream(1, Outbox(16, on_overflow=lambda: None))
    answered = threading.Semaphore(0)
    details: list[str] = []

    def attach(gateway_id: str, target_address: str) -> AttachedChannel:
        raise ChannelError("nobody there")

    def submit(stream: GatewayStream, outcome: AttachOutcome) -> bool:
        details.append(outcome.detail)
        answered.release()
        return True

    monkeypatch.setattr(connector, "attach", attach)
    for _ in range(2 * MAX_ATTACHES):
        connector.start_attach(stream, "target:1", submit)
        assert answered.acquire(timeout=10.0)
    connector.close()
    assert set(details) == {"nobody there"}
