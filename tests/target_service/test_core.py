"""The parts without RPCs: a bug in a step, a reader that does not read, the outbox, sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import target_service.channels
from engine.block_pool import BlockPool
from engine.channel import open_target_channel
from engine.decoder import Decoder
from engine.errors import IntegrityError, InvalidRequest
from engine.request_blocks import RequestBlocks
from engine.seats import SeatAllocator
from protos import common_pb2, target_pb2
from target_service.messages import Admission, AdmissionStatus, RowRequest, SamplingSettings
from target_service.sessions import Sessions
from tests.target_service.conftest import LocalTarget
from tests.target_service.gateway_client import Driver, Gateway
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import prompt_of
from tests.target_service.test_resilience import eventually_free


def test_a_bug_in_a_step_is_a_fault_and_lets_its_requests_go(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, target = local_target()
    forward = Decoder.forward

    def broken(self: Decoder, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no such luck")

    with Gateway(address) as gateway:
        driver = Driver(gateway)
        hit, bystander = driver.request(prompt_of(20), 4), driver.request(prompt_of(9), 4)
        driver.admit(hit)
        driver.admit(bystander)
        driver.step([bystander])
        monkeypatch.setattr(Decoder, "forward", broken)
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=2, rows=[driver.row(hit)]))
        assert (fault.kind, fault.seq, fault.detail) == ("internal", 2, "RuntimeError: no such luck")
        monkeypatch.setattr(Decoder, "forward", forward)
        driver.seq = 2
        result = driver.step([hit, bystander])
        assert [row.status for row in result.rows] == [
            target_pb2.ROW_STATUS_UNKNOWN,
            target_pb2.ROW_STATUS_OK,
        ]
    eventually_free(target)


def test_a_gateway_that_does_not_read_loses_its_stream(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replies pile up to the bound; then its requests are released, and others are served meanwhile."""
    address, target = local_target(event_queue=4)
    with Gateway(address) as reader:
        stuck = threading.Event()
        gateway = Gateway(address)
        monkeypatch.setattr(gateway._events, "put", lambda event: stuck.wait(30))
        try:
            driver = Driver(gateway)
            running = driver.request(prompt_of(3), 3)
            # The transport buffers some events as well: logprobs of the whole vocabulary fill it quickly.
            running.sampling = {"num_logprobs": 512}
            gateway.send(admit=driver.admission(running))
            gateway.send(plan=common_pb2.StepPlan(seq=1, rows=[driver.row(running)]))
            for seq in range(2, 40_000):
                gateway.send(plan=common_pb2.StepPlan(seq=seq))
                if seq > 100 and gateway._call.done():
                    break
            eventually_free(target, 30)
            driver2 = Driver(reader)
            other = driver2.request(prompt_of(5), 3)
            driver2.run([other])
        finally:
            stuck.set()
            gateway.close()


def test_an_attach_does_not_hold_up_a_step(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a new channel may take long to get; steps with other drafters go on meanwhile."""
    address, target = local_target()
    entered, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return open_target_channel(*arguments)

    with Gateway(address) as gateway, ScriptedDrafter(address) as drafter, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(target_service.channels, "open_target_channel", slow)
        try:
            attaching = pool.submit(ScriptedDrafter, address, drafter_id="second")
            assert entered.wait(10)
            driver = Driver(gateway, drafter)
            driver.run([driver.request(prompt_of(5), 3)])
            assert len(drafter.entries) == 3
        finally:
            go_on.set()
        attaching.result(30).close()
    eventually_free(target)


def make_sessions(num_seats: int = 2, num_blocks: int = 9) -> Sessions:
    return Sessions(SeatAllocator(num_seats), RequestBlocks(BlockPool(num_blocks, 4), num_seats, 32))


def placement(request_id: str = "a", epoch: int = 1, num_tokens: int = 6) -> Admission:
    return Admission(request_id, epoch, tuple(range(num_tokens)), num_tokens, 20, SamplingSettings())


def test_sessions_hold_one_epoch_and_free_everything_once() -> None:
    sessions = make_sessions()
    assert sessions.admit(1, placement()).status is AdmissionStatus.OK
    with pytest.raises(InvalidRequest, match="epoch"):
        sessions.admit(1, placement())
    assert sessions.admit(2, placement(epoch=3)).status is AdmissionStatus.OK
    assert sessions.find("a", 1, 1) is None
    assert sessions.find("a", 3, 1) is None
    session = sessions.find("a", 3, 2)
    assert session is not None
    assert not sessions.release("a", 1, 2)
    assert not sessions.release("a", 3, 1)
    assert sessions.release_stream(1) == 0
    assert sessions.admit(1, placement("b")).status is AdmissionStatus.OK
    assert sessions.admit(1, placement("c")).status is AdmissionStatus.NO_SEAT
    assert sessions.blocks.reserve(session.seat, 6)
    sessions.check_integrity()
    assert sessions.release("a", 3, 2)
    assert not sessions.release("a", 3, 2)
    assert sessions.release_stream(1) == 1
    sessions.check_integrity()
    assert (sessions.capacity.free_seats, sessions.capacity.free_blocks) == (2, 8)


def test_integrity_sees_a_seat_that_was_lost() -> None:
    seats = SeatAllocator(2)
    sessions = Sessions(seats, RequestBlocks(BlockPool(9, 4), 2, 32))
    sessions.check_integrity()
    seats.acquire()
    with pytest.raises(IntegrityError):
        sessions.check_integrity()


def test_rows_are_held_against_the_session() -> None:
    sessions = make_sessions()
    sessions.admit(1, placement(num_tokens=6))
    session = sessions.find("a", 1, 1)
    assert session is not None
    sessions.check_row("row", RowRequest("a", 1, 0, 4, 0, 0, False), session)
    sessions.check_row("row", RowRequest("a", 1, 0, 6, 0, 0, True), session)
    session.started, session.context_len = True, 6
    session.tokens.append(9)
    sessions.check_row("row", RowRequest("a", 1, 6, 3, 2, 0, True), session)
    for row in (
        RowRequest("a", 1, 5, 1, 0, 0, True),
        RowRequest("a", 1, 6, 2, 0, 0, True),
        RowRequest("a", 1, 6, 1, 0, 0, False),
    ):
        with pytest.raises(InvalidRequest, match=r"^row\."):
            sessions.check_row("row", row, session)
