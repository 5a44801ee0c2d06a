"""How does a service listen for RPCs, and say how it is?

A gRPC server with the service itself, health ("" and the service's name) and reflection. Stopping takes steps, between
which the service ends what is its own: say NOT_SERVING, `drain`, `stop`, `close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from engine.errors import ConfigError
from serving.streams import FIRST_MESSAGE_S, next_message

MAX_MESSAGE_BYTES = 1 << 30
# Every stream holds a thread of the pool for as long as it lasts, apart from health's.
MAX_STREAMS = 64
STOP_GRACE_S = 2.0
STOP_PATIENCE_S = 3.0  # for the library to say that all calls have ended
DRAIN_POLL_S = 0.05
REFLECTION_S = 10.0  # between two questions on one stream

GARBLED = "a message that cannot be decoded"

_log = logging.getLogger(__name__)


class RpcServer:
    """Owner of the gRPC server, from its port on."""

    def __init__(self, listen: str, key: str, service_name: str, add_servicer: Callable[[grpc.Server], None]) -> None:
        """Bind HOST:PORT. key: the config's, which a ConfigError names when the address cannot be had. add_servicer:
        registers the service.
        """
        self._service_name = service_name
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=[_RequestDeadline(), _Decoding()],
            maximum_concurrent_rpcs=MAX_STREAMS,  # one more is refused; it would wait for a thread without a deadline
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # a second service on the same port fails instead of sharing its calls
                # A peer that vanished without a word holds what it has no longer than this.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
        )
        add_servicer(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(names), self._server)
        host = listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigError(key, f"cannot listen on {listen}: in use or not ours") from error
        self.address = f"{host}:{port}"

    def start(self) -> None:
        """Take calls, and say SERVING."""
        self._server.start()
        for name in ("", self._service_name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def say_not_serving(self) -> None:
        """From now on, whatever comes. Idempotent; any thread."""
        self._health.enter_graceful_shutdown()

    def stop(self) -> None:
        """Take no more calls, and end those that are under way soon. Blocks until they have, or should have."""
        if not self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + STOP_PATIENCE_S):
            _log.warning("calls were still under way %g s after they were ended", STOP_PATIENCE_S)

    def close(self) -> None:
        """After `stop`: let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _RequestDeadline(grpc.ServerInterceptor):  # type: ignore[type-arg]  # the stubs' alone are generic
    """A call of one request whose request does not come would hold a thread of the pool for ever: it is taken for a
    stream of requests, which is the same to the peer, and the first one waited for with a deadline.
    """

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        answer = handler.unary_unary

        def with_deadline(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                request = next_message(requests, FIRST_MESSAGE_S)
            except TimeoutError as error:
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
            if request is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            return answer(request, context)

        return grpc.stream_unary_rpc_method_handler(
            with_deadline, handler.request_deserializer, handler.response_serializer
        )


class _Garbled:
    """Stands for a message that is none of its method's."""


_GARBLED = _Garbled()


class _Decoding(grpc.ServerInterceptor):  # type: ignore[type-arg]  # as above
    """A message that is none of the method's ends its call with INVALID_ARGUMENT, and is one line here.

    The library would log a traceback, and at times keep the call for ever: it ends a stream of requests itself then,
    while the method, whose requests have come to an end, ends it too.
    """

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        handler = continuation(details)
        if handler is None:
            return handler

        def decode(message: bytes) -> Any:
            try:
                return handler.request_deserializer(message)
            except DecodeError:
                _log.warning("%s: %s", details.method, GARBLED)
                return _GARBLED

        checked = _of_stream if handler.request_streaming else _of_one
        kinds = ("stream_stream", "stream_unary", "unary_stream", "unary_unary")
        answers = {kind: checked(answer) for kind in kinds if (answer := getattr(handler, kind)) is not None}
        return handler._replace(request_deserializer=decode, **answers)


def _of_one(answer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(answer)  # its attributes are the library's: health's streams say by one that they hold no thread
    def respond(request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        if request is _GARBLED:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, GARBLED)
        return answer(request, context, *rest)

    return respond


def _of_stream(answer: Callable[[Any, Any], Any]) -> Callable[[Iterator[Any], grpc.ServicerContext], Any]:
    """To the method a garbled message is the end of the requests; to the peer it is why the call ended."""

    def decodable(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            if request is _GARBLED:
                context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
                context.set_details(GARBLED)
                return
            yield request

    return lambda requests, context: answer(decodable(requests, context), context)


class _Reflection:
    """grpc's own, which would let a peer that asks nothing hold its thread for ever."""

    def __init__(self, names: Sequence[str]) -> None:
        self._answers: Any = reflection.ReflectionServicer(names)

    def ServerReflectionInfo(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """See grpc's."""

        def questions() -> Iterator[Any]:
            while (question := next_message(request_iterator, REFLECTION_S)) is not None:
                yield question

        try:
            yield from self._answers.ServerReflectionInfo(questions(), context)
        except TimeoutError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))


def drain(num_resident: Callable[[], int], deadline_s: float, failed: threading.Event) -> None:
    """Wait until no request is resident, the service has failed, or the deadline has passed."""
    ends = time.monotonic() + deadline_s
    while num_resident() and (left_s := ends - time.monotonic()) > 0 and not failed.is_set():
        failed.wait(min(DRAIN_POLL_S, left_s))  # the device thread tells nobody when it becomes idle
