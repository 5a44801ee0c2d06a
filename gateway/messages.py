"""What do the gateway and the services say to each other, as plain values?

The twins of the protobuf messages that `codec` translates to and from; nothing else in the gateway sees protobuf.
Words are those of protos/common.proto: row, step, seq, epoch, channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.generation import SamplingOptions, TokenLogprob


class BadEvent(Exception):
    """A service sent something that makes no sense; says what. The stream it came on is given up."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a service has left. free_blocks counts cached blocks that may be evicted."""

    free_seats: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Who the target is and how much it holds; see protos/target.proto. num_blocks: that requests can hold together."""

    instance_id: str
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_seats: int
    max_step_tokens: int
    eos_token_ids: frozenset[int]
    max_verify_len: int

    @property
    def max_request_len(self) -> int:
        """Longest prompt and output together that fits when nothing else runs."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """Who the drafter is; vocab_size 0: any."""

    instance_id: str
    drafter_id: str
    method: str
    max_draft_len: int
    version: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    """The drafter's answer to `open_channel`."""

    target_address: str
    ok: bool
    channel_id: str
    channel_epoch: int
    kind: str
    target_instance_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's placement on a service; `sampling.seed` and `seeded` as the service takes them."""

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    prompt_len: int
    max_total_len: int
    sampling: SamplingOptions
    seed: int
    seeded: bool
    channel_id: str = ""
    mid_stream: bool = False


class AdmitStatus(Enum):
    """What a service makes of a placement."""

    OK = "ok"
    NO_SEAT = "no_seat"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer to a placement; cached_len: tokens whose KV the service holds already."""

    request_id: str
    epoch: int
    status: AdmitStatus
    cached_len: int
    field: str
    detail: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Released:
    """The answer to a release."""

    request_id: str
    epoch: int
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's share of one step."""

    request_id: str
    epoch: int
    context_len: int
    query_len: int
    verify_len: int
    draft_len: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step; channel_id empty: no drafter takes part. ahead: plans that may follow before its verdict has come."""

    seq: int
    channel_id: str
    channel_epoch: int
    rows: tuple[RowPlan, ...]
    drafts_from_seq: int
    deadline_ms: int
    ahead: int = 0


class RowStatus(Enum):
    """Whether a row ran. SKIPPED: planned ahead, and what became of the rows before it left nothing to run."""

    OK = "ok"
    STARVED = "starved"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one row; see RowResult in protos/target.proto."""

    request_id: str
    epoch: int
    status: RowStatus
    token_ids: tuple[int, ...]
    num_accepted: int
    num_drafted: int
    context_len: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one step; times in milliseconds, as the target measured them.

    collective_ms: of forward_ms, what the target's first rank stood in collectives. rank_loads: tokens and query-key
    pairs of each rank; empty on a target of one rank.
    """

    seq: int
    verdicts: tuple[Verdict, ...]
    capacity: Capacity
    wait_ms: float
    forward_ms: float
    verify_ms: float
    total_ms: float
    drafts_missed: bool
    collective_ms: float = 0.0
    rank_loads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What happened to step `seq` on the drafter."""

    seq: int
    channel_id: str
    missed: bool
    cold_request_ids: tuple[str, ...]
    num_drafted: int
    wait_ms: float
    prefill_ms: float
    draft_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A command that a service could not carry out; its stream lives on. seq 0, request_id "": not about one."""

    kind: str
    detail: str
    seq: int
    request_id: str


TargetEvent = TargetInfo | Admitted | StepResult | Released | Fault
DrafterEvent = DrafterInfo | ChannelOpened | Admitted | DraftReport | Released | Fault
