"""How do gRPC clients generate, and ask how the gateway is?

outrider.v1.GatewayService over the dispatcher, with gRPC health and reflection beside it. Health is SERVING while a
target is connected, NOT_SERVING otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, get_args

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.checks import MAX_REQUEST_ID_LEN
from gateway.dispatcher import Dispatcher
from gateway.error_map import Problem, describe
from gateway.errors import GatewayError, InvalidGeneration
from gateway.generation import Delta, Generation, SamplingOptions
from gateway.rest.schemas import MAX_MESSAGES, Role, template_role
from gateway.undecodable import RefuseUndecodable
from protos import gateway_pb2, gateway_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
HEALTH_POLL_S = 0.2
ROLES: tuple[str, ...] = get_args(Role)


class PromptEncoder(Protocol):
    """How a prompt becomes token ids; see `gateway.rest.served.ServedModel`. Both raise InvalidGeneration naming
    `field`.
    """

    async def encode(self, text: str, field: str, *, add_special_tokens: bool) -> tuple[int, ...]: ...

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, field: str
    ) -> tuple[int, ...]: ...


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The service. Stateless: every call is a generation of the dispatcher's."""

    def __init__(self, dispatcher: Dispatcher, encoder: PromptEncoder, version: str) -> None:
        self._dispatcher = dispatcher
        self._encoder = encoder
        self._version = version

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Stream one generation. A client that cancels frees its seats within one step."""
        request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        with_logprobs = request.HasField("logprobs")
        try:
            if len(request_id) > MAX_REQUEST_ID_LEN:  # it is in every response
                raise InvalidGeneration("request_id", f"must have at most {MAX_REQUEST_ID_LEN} characters")
            generation = await self._generation(request)
            async with await self._dispatcher.submit(generation) as deltas:
                async for delta in deltas:
                    yield _response(request_id, delta, with_logprobs)
        except GatewayError as error:
            await _abort(context, describe(error))
        except Exception as error:  # gRPC would tell the client what we raised, under a status of its own
            _log.exception("a call failed")
            await _abort(context, describe(error))

    async def GetStatus(
        self, request: gateway_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.GetStatusResponse:
        """How the services are and how much is going on."""
        status = self._dispatcher.status()
        return gateway_pb2.GetStatusResponse(
            services=[
                gateway_pb2.ServiceStatus(
                    address=service.address, role=service.role, state=service.state, detail=service.detail
                )
                for service in status.services
            ],
            running=status.running,
            waiting=status.waiting,
            version=self._version,
        )

    async def _generation(self, request: gateway_pb2.GenerateRequest) -> Generation:
        field = request.WhichOneof("input")
        match field:
            case "prompt":
                token_ids = await self._encoder.encode(request.prompt, "prompt", add_special_tokens=True)
            case "chat":
                token_ids = await self._encoder.encode_chat(_conversation(request.chat), None, "chat")
            case "token_ids":
                token_ids = tuple(request.token_ids.ids)
            case _:
                raise InvalidGeneration("input", "one of prompt, chat and token_ids must be set")
        return Generation(
            request_id=f"grpc-{uuid.uuid4().hex}",  # the client's own need not be unique
            token_ids=token_ids,
            max_tokens=request.max_tokens or None,
            sampling=_sampling(request),
            stop_token_ids=frozenset(request.stop_token_ids),
            stop=tuple(request.stop),
            ignore_eos=request.ignore_eos,
            draft_len=request.draft_len if request.HasField("draft_len") else None,
            input_field=field,
        )


def _conversation(chat: gateway_pb2.ChatMessages) -> list[dict[str, str]]:
    """As chat templates take it. Raises InvalidGeneration."""
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidGeneration("chat", f"must have at least one message and at most {MAX_MESSAGES}")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidGeneration(f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    return [{"role": template_role(message.role), "content": message.content} for message in chat.messages]


def _sampling(request: gateway_pb2.GenerateRequest) -> SamplingOptions:
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if request.HasField(name)
    }
    if request.HasField("logprobs"):
        given["num_logprobs"] = request.logprobs
    return SamplingOptions(**given, logit_bias=dict(request.logit_bias))


def _response(request_id: str, delta: Delta, with_logprobs: bool) -> gateway_pb2.GenerateResponse:
    response = gateway_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        from_draft=delta.from_draft,
        finish_reason=delta.finish_reason or "",
    )
    if with_logprobs:
        response.logprobs.extend([logprob.logprob for logprob in delta.logprobs])
    usage = delta.usage
    if usage is not None:
        response.usage.CopyFrom(
            gateway_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                drafted_tokens=usage.drafted_tokens,
                accepted_tokens=usage.accepted_tokens,
            )
        )
    return response


async def _abort(context: grpc.aio.ServicerContext[Any, Any], problem: Problem) -> NoReturn:
    trailing = () if problem.retry_after_s is None else (("retry-after", str(problem.retry_after_s)),)
    await context.abort(problem.grpc_status, problem.named_message(), trailing)
    raise AssertionError("abort raises")


class GrpcFace:
    """The public gRPC server: owner of its port, from `start` to `stop`."""

    def __init__(self, dispatcher: Dispatcher, encoder: PromptEncoder, address: str, version: str) -> None:
        self._dispatcher = dispatcher
        self._address = address
        self._server = grpc.aio.server(
            interceptors=(RefuseUndecodable(),),
            options=(
                ("grpc.so_reuseport", 0),
                # A client that vanished without a word is noticed, and what it asked for is given up.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs do not have it
        self._health_task: asyncio.Task[None] | None = None
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(
            GatewayServicer(dispatcher, encoder, version), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Bind and serve. Returns the port. Raises OSError when the address cannot be bound."""
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}: in use or not ours") from error
        if port == 0:
            raise OSError(f"cannot listen on {self._address}")
        await self._set_health(False)
        await self._server.start()
        self._health_task = asyncio.create_task(self._follow_health())
        return port

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, let calls end for `grace_s`, then cut them off."""
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        await self._set_health(False)
        await self._server.stop(grace_s)

    async def _follow_health(self) -> None:
        known = False
        while True:
            ready = self._dispatcher.status().ready
            if ready is not known:
                await self._set_health(ready)
                known = ready
            await asyncio.sleep(HEALTH_POLL_S)

    async def _set_health(self, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, response.SERVING if serving else response.NOT_SERVING)
