"""Which HTTP status, OpenAI error shape and gRPC status does each gateway error become?

The one place that knows. Anything outside the tree is the gateway's own fault: 500 and INTERNAL, without details.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc

from gateway.errors import (
    GatewayError,
    GenerationTimeout,
    InvalidGeneration,
    QueueFull,
    ShuttingDown,
    StepFailed,
    TargetUnavailable,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error as the two public faces tell it.

    http_status, type, code, param: OpenAI's error shape. retry_after_s: whole seconds for `Retry-After`, or None. With
    a 503 it is fixed: the request's own place in the queue has just come free, or a service is being started anew.
    """

    http_status: int
    type: str
    code: str | None
    param: str | None
    message: str
    retry_after_s: int | None
    grpc_status: grpc.StatusCode

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
        message = self.named_message()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """HTTP headers that go with it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def named_message(self) -> str:
        """The message, starting with the field where one is at fault."""
        return self.message if self.param is None else f"{self.param}: {self.message}"


def describe(error: BaseException) -> Problem:
    """What to tell a client about `error`. Never raises."""
    status = grpc.StatusCode
    match error:
        case InvalidGeneration():
            return Problem(400, "invalid_request_error", None, error.field, error.detail, None, status.INVALID_ARGUMENT)
        case QueueFull():
            retry = max(1, math.ceil(error.retry_after_s))
            return Problem(429, "rate_limit_error", "queue_full", None, error.detail, retry, status.RESOURCE_EXHAUSTED)
        case GenerationTimeout():
            return Problem(503, "server_error", "queue_timeout", None, error.detail, 1, status.DEADLINE_EXCEEDED)
        case TargetUnavailable():
            return Problem(503, "server_error", "target_unavailable", None, error.detail, 5, status.UNAVAILABLE)
        case ShuttingDown():
            return Problem(503, "server_error", "shutting_down", None, error.detail, 5, status.UNAVAILABLE)
        case StepFailed():
            return Problem(500, "server_error", "step_failed", None, error.detail, None, status.INTERNAL)
        case GatewayError():
            return Problem(500, "server_error", None, None, error.detail, None, status.INTERNAL)
        case _:
            message = "The gateway failed to answer this request; its log says why."
            return Problem(500, "server_error", "internal_error", None, message, None, status.INTERNAL)
