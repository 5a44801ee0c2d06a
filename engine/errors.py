"""Which errors do the services raise on purpose?

A small tree: each class has a `kind`, the word that goes into `Fault.kind` and into logs. Whatever is not an
OutriderError is a bug and is left to crash loudly.
"""

from __future__ import annotations

from typing import ClassVar


class OutriderError(Exception):
    """Root of the tree. `str(error)` is one line, fit to be shown to whoever caused it."""

    kind: ClassVar[str] = "internal"


class ConfigError(OutriderError):
    """A configuration value cannot be used. key: dotted path in the file, e.g. `target.block_size`."""

    kind: ClassVar[str] = "config"

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.detail = detail


class ModelError(OutriderError):
    """A model directory is missing, incomplete, or of a family that is not supported."""

    kind: ClassVar[str] = "model"


class CapacityError(OutriderError):
    """There is no seat, block or queue place for it now; trying again later may work."""

    kind: ClassVar[str] = "capacity"


class ChannelError(OutriderError):
    """A channel could not be opened, attached or agreed upon."""

    kind: ClassVar[str] = "channel"


class ProtocolError(OutriderError):
    """A peer sent a message that the protocol does not allow here."""

    kind: ClassVar[str] = "protocol"


class RanksLost(OutriderError):
    """Ranks of a target do not run together any more: one has died, hangs, or fell out of step. Ends the process."""

    kind: ClassVar[str] = "ranks"


class IntegrityError(OutriderError):
    """Accounting of blocks or seats is broken (double free, lost block): a bug, never the caller's input."""

    kind: ClassVar[str] = "integrity"


class InvalidRequest(OutriderError):
    """A request can never run here. field: the request's field at fault."""

    kind: ClassVar[str] = "invalid_request"

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field
        self.detail = detail
