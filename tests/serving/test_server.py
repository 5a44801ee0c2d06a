"""Does a server end what asks nothing of it?"""

from __future__ import annotations

import queue
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import serving.server
from engine.errors import ConfigError
from serving.server import RpcServer


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
