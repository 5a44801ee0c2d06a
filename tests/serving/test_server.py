"""Does a server end what asks nothing of it?"""

from __future__ import annotations

import logging
import queue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import serving.server
from engine.errors import ConfigError
from serving.server import MAX_STREAMS, RpcServer


def test_a_reflection_stream_that_asks_nothing_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.server, "REFLECTION_S", 0.5)
    server = RpcServer("127.0.0.1:0", "test.listen", "test.Test", lambda _: None)
    server.start()
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            answers: Any = stub.ServerReflectionInfo(iter(questions.get, None), timeout=20)
            for _ in range(2):
                questions.put(reflection_pb2.ServerReflectionRequest(list_services=""))
                assert "test.Test" in str(next(answers))
            with pytest.raises(grpc.RpcError):
                next(answers)
            assert answers.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert answers.details() == "no message within 0.5 s"
            questions.put(None)
    finally:
        server.stop()
        server.close()


def test_an_address_that_is_taken_names_the_key() -> None:
    first = RpcServer("127.0.0.1:0", "test.listen", "test.Test", lambda _: None)
    try:
        with pytest.raises(ConfigError, match=r"test.listen: cannot listen on"):
            RpcServer(first.address, "test.listen", "test.Test", lambda _: None)
    finally:
        first.stop()
        first.close()


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", REFLECTION])
def test_a_message_that_cannot_be_decoded_is_one_line(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is left of its call, which would hold up the stop."""
    server = RpcServer("127.0.0.1:0", "test.listen", "test.Test", lambda _: None)
    server.start()
    try:
        with grpc.insecure_channel(server.address) as channel, caplog.at_level(logging.INFO):
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(method, bytes, bytes)(iter([b"\xff garbage"]), timeout=20))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details() == "a message that cannot be decoded"
    finally:
        server.stop()
        server.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == [f"{method}: a message that cannot be decoded"]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("asks", [False, True])
def test_a_call_whose_request_does_not_come_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """As many as there are places: whoever calls afterwards is answered. One that ends without a request is told so."""
    monkeypatch.setattr(serving.server, "FIRST_MESSAGE_S", 0.3)
    monkeypatch.setattr(serving.server, "MAX_STREAMS", 4)
    server = RpcServer("127.0.0.1:0", "test.listen", "test.Test", lambda _: None)
    server.start()
    silence: queue.SimpleQueue[None] = queue.SimpleQueue()
    try:
        with grpc.insecure_channel(server.address) as channel:
            # To the peer a call of one request is a stream of one.
            check = channel.stream_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            if asks:
                with pytest.raises(grpc.RpcError) as refused:
                    check(iter(()), timeout=20)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            else:
                calls = [check.future(iter(silence.get, None), timeout=20) for _ in range(4)]
                # The server's deadline, not the callers'.
                assert {call.details() for call in calls} == {"no message within 0.3 s"}
                assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        for _ in range(4):
            silence.put(None)
        server.stop()
        server.close()


def test_whoever_watches_the_health_holds_no_thread() -> None:
    server = RpcServer("127.0.0.1:0", "test.listen", "test.Test", lambda _: None)
    server.start()
    try:
        with grpc.insecure_channel(server.address) as channel:
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch", bytes, health_pb2.HealthCheckResponse.FromString
            )
            watches: list[Any] = [watch(b"", timeout=30) for _ in range(MAX_STREAMS + 6)]
            assert {next(states).status for states in watches} == {health_pb2.HealthCheckResponse.SERVING}
            for states in watches:
                states.cancel()
    finally:
        server.stop()
        server.close()
