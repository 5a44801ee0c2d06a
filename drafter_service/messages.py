"""What does a gateway ask of the drafter, and what does it hear back?

The commands and events of DrafterService as plain values; `codec.py` alone knows their protobuf form.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine.errors import OutriderError


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every stream."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Attach to this target, or attach again."""

    target_address: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A request's placement: token_ids is the prompt (the first prompt_len) and what earlier epochs generated.

    seeded: the user gave the seed, so its drafts need no probabilities. channel_id: whose ring carries its rows.
    mid_stream: a target runs it already; its context does not come through the ring again. temperature: 0, greedy.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    prompt_len: int
    max_total_len: int
    channel_id: str
    mid_stream: bool = False
    seeded: bool = False
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What the drafter needs of a RowPlan; true lengths come with the ring entry.

    context_len: at most so many tokens before it; query_len: at most so many in it.
    """

    request_id: str
    epoch: int
    draft_len: int
    context_len: int = 0
    query_len: int = 0


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One step: rows in the ring entry's order. deadline_ms: how long the services wait for each other inside it.

    ahead: plans that may follow before the gateway has this step's verdict; 0: lockstep.
    """

    seq: int
    channel_id: str
    channel_epoch: int
    rows: tuple[RowRequest, ...]
    deadline_ms: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """The gateway is done with a request's placement."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that could not be read as a command."""

    error: OutriderError
    request_id: str = ""
    seq: int = 0


Command = Hello | OpenChannel | Admission | StepRequest | ReleaseRequest | Unreadable


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is free now. Cached blocks that could be evicted count as free; a method without KV has no blocks."""

    free_seats: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What this drafter is. vocab_size 0: drafts for any."""

    instance_id: str
    drafter_id: str
    method: str
    max_draft_len: int
    version: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ChannelReply:
    """How an OpenChannel ended. detail: why not, when not ok."""

    target_address: str
    ok: bool
    channel_id: str = ""
    channel_epoch: int = 0
    kind: str = ""
    target_instance_id: str = ""
    detail: str = ""


class AdmissionStatus(Enum):
    """How an admission ended."""

    OK = auto()
    NO_SEAT = auto()
    INVALID = auto()


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """cached_len: leading tokens whose draft KV is here already, < len(token_ids). field, detail: why it is INVALID."""

    request_id: str
    epoch: int
    status: AdmissionStatus
    capacity: Capacity
    cached_len: int = 0
    field: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """The placement named is not (any longer) resident."""

    request_id: str
    epoch: int
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Milliseconds of a step: waiting for the ring entry, draft prefill, draft steps, all of it."""

    wait_ms: float = 0.0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened to a step. cold_request_ids: not drafted for until admitted anew, mid-stream."""

    seq: int
    channel_id: str
    capacity: Capacity = Capacity(0, 0)
    missed: bool = False
    cold_request_ids: tuple[str, ...] = ()
    num_drafted: int = 0
    metadata_builds: int = 0
    metadata_launches: int = 0
    times: DraftTimes = DraftTimes()


@dataclass(frozen=True, slots=True)
class FaultReply:
    """A command could not be carried out; the stream lives on."""

    kind: str
    detail: str
    seq: int = 0
    request_id: str = ""


Event = ServiceInfo | ChannelReply | AdmissionReply | ReleaseReply | StepReport | FaultReply
