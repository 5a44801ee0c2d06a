"""A peer that holds a stream open and says nothing takes no place for ever."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import grpc
import pytest

import target_service.servicer
from protos import target_pb2_grpc
from tests.target_service.conftest import LocalTarget
from tests.target_service.gateway_client import Gateway
from tests.target_service.test_faults import admission


def test_an_exchange_that_never_says_whose_it_is_is_ended(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of them would hold all the threads there are."""
    monkeypatch.setattr(target_service.servicer, "FIRST_MESSAGE_S", 0.5)
    address, _ = local_target()
    nothing: queue.SimpleQueue[None] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        call: Any = target_pb2_grpc.TargetServiceStub(channel).Exchange(iter(nothing.get, None), timeout=20)
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert call.details() == "no message within 0.5 s; the first one names the channel"
        nothing.put(None)


def test_a_gateway_that_falls_silent_gives_its_seats_back(local_target: Callable[..., LocalTarget]) -> None:
    address, target = local_target(gateway_lease_s=1.0)
    silent = Gateway(address)
    silent.admit(admission(request_id="a"))
    assert len(target.core.sessions) == 1
    silent._reader.join(20)
    assert silent.status == grpc.StatusCode.DEADLINE_EXCEEDED
    silent.close()
    with Gateway(address) as other:
        other.admit(admission(request_id="b"))
        assert len(target.core.sessions) == 1
