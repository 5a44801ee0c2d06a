"""Does the public gRPC service say what the dispatcher says, and in which status does it fail?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.errors import InvalidGeneration
from gateway.servicer import SERVICE_NAME, GrpcFace
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import MakeStack
from tests.gateway.stack_of_fakes import Stack, eventually
from tests.gateway.toy import continuation
from tests.ports import ReservedPort


class Encoder:
    """A text is its characters' codes; so is a message's content."""

    async def encode(self, text: str, field: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if not text:
            raise InvalidGeneration(field, "must not be empty")
        if text == "crash":
            raise RuntimeError("secret")
        return tuple(ord(character) % 90 + 1 for character in text)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, field: str
    ) -> tuple[int, ...]:
        assert {message["role"] for message in messages} <= {"system", "user", "assistant"}
        return await self.encode("".join(message["content"] for message in messages), field, add_special_tokens=False)


@asynccontextmanager
async def serving(stack: Stack, port: int) -> AsyncIterator[grpc.aio.Channel]:
    """The face over the stack's dispatcher, and a channel to it."""
    face = GrpcFace(stack.dispatcher, Encoder(), f"127.0.0.1:{port}", "1.2.3")
    await face.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await face.stop(0.1)


async def test_a_stream_of_everything(make_stack: MakeStack, reserve_port: type[ReservedPort]) -> None:
    stack = await make_stack()
    async with serving(stack, reserve_port().port) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateRequest(
            request_id="mine",
            token_ids=gateway_pb2.TokenIds(ids=[4, 8]),
            max_tokens=25,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
        )
        responses = [response async for response in stub.Generate(request)]
        expected = continuation((4, 8), 25)
        tokens = [token for response in responses for token in response.token_ids]
        assert tokens == expected
        assert [logprob for response in responses for logprob in response.logprobs] == [
            -float(token) for token in tokens
        ]
        assert "".join(response.text for response in responses) == "".join(f"{token} " for token in expected)
        assert {response.request_id for response in responses} == {"mine"}
        assert all(len(response.from_draft) == len(response.token_ids) for response in responses)
        last = responses[-1]
        assert last.finish_reason == "length"
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 25)
        assert 0 < last.usage.accepted_tokens <= last.usage.drafted_tokens
        assert not any(response.finish_reason or response.HasField("usage") for response in responses[:-1])


def said(role: str, content: str, empty: int = 1) -> gateway_pb2.ChatMessages:
    """A message after `empty` developer messages without words."""
    message = gateway_pb2.ChatMessage
    return gateway_pb2.ChatMessages(
        messages=[message(role="developer")] * empty + [message(role=role, content=content)]
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "input"),
        ({"prompt": ""}, "prompt"),
        ({"chat": gateway_pb2.ChatMessages()}, "chat"),
        ({"chat": said("user", "")}, "chat: "),
        ({"chat": said("user", "a" * 300)}, "chat: "),
        ({"chat": said("wizard", "a")}, "chat.messages[1].role"),
        ({"chat": said("", "a")}, "chat.messages[1].role"),
        ({"chat": said("user", "", 5000)}, "chat: "),
        ({"prompt": "a", "request_id": "x" * 257}, "request_id"),
        ({"token_ids": gateway_pb2.TokenIds()}, "token_ids"),
        ({"token_ids": gateway_pb2.TokenIds(ids=[97])}, "token_ids"),
        ({"prompt": "a", "temperature": -1.0}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "top_p": 0.0}, "top_p"),
        ({"prompt": "a", "min_p": 2.0}, "min_p"),
        ({"prompt": "a", "repetition_penalty": 0.0}, "repetition_penalty"),
        ({"prompt": "a", "logit_bias": {97: 1.0}}, "logit_bias"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop_token_ids": [97]}, "stop_token_ids"),
        ({"prompt": "a", "logprobs": 500}, "logprobs"),
        ({"prompt": "a", "max_tokens": 10_000}, "max_tokens"),
        ({"prompt": "a", "draft_len": 99}, "draft_len: must be in 0..7, got 99"),
        ({"prompt": "a" * 300}, "prompt"),
    ],
)
async def test_bad_input_names_its_field(
    make_stack: MakeStack, free_port: int, fields: dict[str, Any], named: str
) -> None:
    stack = await make_stack(drafting=False)
    async with serving(stack, free_port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(gateway_pb2.GenerateRequest(**fields)):
                pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")


async def test_a_fault_of_ours_is_internal_without_details(make_stack: MakeStack, free_port: int) -> None:
    stack = await make_stack()
    async with serving(stack, free_port) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(gateway_pb2.GenerateRequest(prompt="crash")).read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())


@pytest.mark.parametrize(
    "method",
    [
        f"/{SERVICE_NAME}/Generate",
        f"/{SERVICE_NAME}/GetStatus",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_message_that_cannot_be_decoded_is_the_clients_fault(
    make_stack: MakeStack, free_port: int, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack(drafting=False)
    async with serving(stack, free_port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.stream_stream(method, bytes, bytes)(iter([b"\xff garbage"]), timeout=20):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message cannot be decoded"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING") or record.exc_info]


async def test_full_is_resource_exhausted_and_says_when_to_retry(make_stack: MakeStack, free_port: int) -> None:
    stack = await make_stack(drafting=False, target={"num_seats": 1}, max_waiting=0)
    stack.target.step_s = 0.01
    async with serving(stack, free_port) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateRequest(prompt="ab", max_tokens=100, ignore_eos=True)
        first = stub.Generate(request)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: Any = caught.value.trailing_metadata()
        assert dict(trailing)["retry-after"] == "1"
        first.cancel()
        await stack.until_empty()


async def test_a_cancelled_call_frees_its_place(make_stack: MakeStack, free_port: int) -> None:
    stack = await make_stack()
    stack.target.step_s = 0.005
    async with serving(stack, free_port) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
            gateway_pb2.GenerateRequest(prompt="ab", max_tokens=200, ignore_eos=True)
        )
        await call.read()
        call.cancel()
        await stack.until_empty()


async def test_status_health_and_reflection(make_stack: MakeStack, free_port: int) -> None:
    stack = await make_stack()
    async with serving(stack, free_port) as channel:
        status = await gateway_pb2_grpc.GatewayServiceStub(channel).GetStatus(gateway_pb2.GetStatusRequest())
        assert [(service.role, service.state) for service in status.services] == [
            ("target", "serving"),
            ("drafter", "serving"),
        ]
        assert status.version == "1.2.3"

        health = health_pb2_grpc.HealthStub(channel)

        async def until(serving: bool) -> None:
            wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE_NAME):
                async with asyncio.timeout(5):
                    async for response in health.Watch(health_pb2.HealthCheckRequest(service=name)):
                        if response.status == wanted:
                            break

        await until(True)
        await stack.target.kill()
        await eventually(lambda: stack.service("target") == "lost")
        await until(False)
        await stack.target.start()
        await until(True)

        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        assert SERVICE_NAME in {service.name for service in listed.list_services_response.service}
        call.cancel()
