"""What is a step that was launched and has not come back?

With device execution the host puts a step on the device and goes on; the step's verdicts come later, in the order of
the launches. A `Flight` holds everything that is needed then. Steps that are done when they return never fly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from target_service.channels import OpenChannel
from target_service.messages import Event, RowRequest, RowStatus, StepRequest
from target_service.sessions import Session


class Landing(Protocol):
    """How one learns that the device is done with a step."""

    def done(self) -> bool:
        """Whether it is. Does not wait."""
        ...

    def wait(self) -> None:
        """Block until it is. Any thread; may be called again."""
        ...


@dataclass(slots=True)
class FlightRow:
    """One row of a step as it was launched; never changed (see RowRequest).

    status: what the host could tell at once; OK: it is for the device to run. query_len: tokens it was launched with, 0
    where it was not. limit: query tokens at positions from there on do not count (decode rows). num_logits: logit rows
    it has.
    """

    request: RowRequest
    session: Session | None
    status: RowStatus
    query_len: int = 0
    limit: int = 0
    num_logits: int = 0
    is_prompt: bool = False


@dataclass(slots=True)
class Flight:
    """One step under way. Changed by the device thread only, apart from what `landing` waits on.

    wanted: it was launched with drafts to verify; waited: and waits for them. lost: drafts were wanted, and already at
    the launch there was nowhere to take them from. results: the runner's own. reply: what its stream is told, once it
    is known.
    """

    step: StepRequest
    rows: tuple[FlightRow, ...]
    landing: Landing
    channel: OpenChannel | None = None
    wanted: bool = False
    waited: bool = False
    lost: bool = False
    results: Any = field(default=None, repr=False)
    reply: Event | None = None
