"""Which errors belong to HTTP alone, beside those of the gateway's tree?"""

from __future__ import annotations

import grpc

from gateway.error_map import Problem


class ApiError(Exception):
    """A request that HTTP itself turns down; carries what the client is told."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: the input named by `param` is wrong; `message` goes on from its name."""
    status = grpc.StatusCode.INVALID_ARGUMENT
    return ApiError(Problem(400, "invalid_request_error", code, param, message, None, status))


def unknown_model(model: str, served: str) -> ApiError:
    """404: another model than the one served."""
    message = f"{model!r} does not exist; this server serves {served!r}"
    return ApiError(
        Problem(404, "invalid_request_error", "model_not_found", "model", message, None, grpc.StatusCode.NOT_FOUND)
    )


def too_large(max_bytes: int) -> ApiError:
    """413: the body is longer than this server reads."""
    message = f"is longer than {max_bytes} bytes"
    status = grpc.StatusCode.INVALID_ARGUMENT
    return ApiError(Problem(413, "invalid_request_error", "request_too_large", "body", message, None, status))


def too_slow(deadline_s: float) -> ApiError:
    """408: the body did not come within its time."""
    message = f"did not come within {deadline_s:g} seconds"
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    return ApiError(Problem(408, "invalid_request_error", "request_timeout", "body", message, None, status))


def http_problem(status_code: int, message: str) -> Problem:
    """What the web framework turned down by itself: no such path, wrong method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(status_code)
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    status = grpc.StatusCode.NOT_FOUND if status_code == 404 else grpc.StatusCode.UNKNOWN
    return Problem(status_code, kind, code, None, message, None, status)
