"""What can go wrong for a generation, in the words of whoever asked for it?

A small tree; `error_map` alone knows what each means in HTTP and in gRPC.
"""

from __future__ import annotations


class GatewayError(Exception):
    """Anything the gateway tells a client about. `detail` is a whole sentence without secrets."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class ConfigError(GatewayError):
    """The config file is wrong; `key` is the dotted path of the setting."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key


class InvalidGeneration(GatewayError):
    """The request can never be served as asked; `field` names the input at fault in the API's own words."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


class QueueFull(GatewayError):
    """As many requests wait as may wait. `retry_after_s` (> 0) is an estimate of when one more fits."""

    def __init__(self, retry_after_s: float, detail: str = "Too many requests are waiting; try again later.") -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class GenerationTimeout(GatewayError):
    """The request waited longer than `gateway.queue_timeout_s` without being started."""


class TargetUnavailable(GatewayError):
    """The target is gone, and stayed away for `gateway.target_wait_s`; or it never came."""


class ShuttingDown(GatewayError):
    """The gateway is stopping and takes no new work, or stopped before this request ended."""


class StepFailed(GatewayError):
    """The target could not carry out a step for a reason that is neither the client's nor a lost connection."""
