"""What becomes of a gRPC call whose message is none of its method's?

It is the client's fault and told to the client alone: INVALID_ARGUMENT. grpc.aio takes it for the servicer's, with a
traceback in the log and a status of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]


class RefuseUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the stubs' alone is generic
    """For every method of a server: those of one request, and those of a stream of them."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None:
            return handler
        decode = handler.request_deserializer

        def decode_or_none(message: bytes) -> Any:
            try:
                return decode(message)
            except DecodeError:
                return None

        if handler.request_streaming:
            found = {"stream_stream": handler.stream_stream, "stream_unary": handler.stream_unary}
            checked: Callable[[Any, Context], Awaitable[Any]] = _checked_stream
        else:
            found = {"unary_stream": handler.unary_stream, "unary_unary": handler.unary_unary}
            checked = _checked
        answers = {kind: _behind(checked, answer) for kind, answer in found.items() if answer is not None}
        return handler._replace(request_deserializer=decode_or_none, **answers)


def _behind(checked: Callable[[Any, Context], Awaitable[Any]], answer: Callable[[Any, Context], Any]) -> Any:
    """`answer` for what comes through `checked`, of the same kind to grpc.aio: an async generator or a coroutine."""

    async def generate(asked: Any, context: Context) -> AsyncIterator[Any]:
        async with aclosing(answer(await checked(asked, context), context)) as responses:
            async for response in responses:
                yield response

    async def respond(asked: Any, context: Context) -> Any:
        return await answer(await checked(asked, context), context)

    return generate if inspect.isasyncgenfunction(answer) else respond


async def _checked(request: Any, context: Context) -> Any:
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be decoded")
    return request


async def _checked_stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async def decodable() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _checked(request, context)

    return decodable()
