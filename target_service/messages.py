"""What does a gateway ask of the target, and what does it hear back?

The commands and events of TargetService as plain values; `codec.py` alone knows their protobuf form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.errors import OutriderError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a request's tokens are chosen, with every "off" value resolved.

    temperature 0: greedy. seed: bit pattern of the uint64 as int64. seeded: the user gave it, so output must not depend
    on drafts. num_logprobs: -1 none, 0 the sampled token's, n plus the n best.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    seeded: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1

    @property
    def has_penalties(self) -> bool:
        """Whether the row's logits depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every stream."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A request's placement: token_ids is the prompt (the first prompt_len) and what earlier epochs generated."""

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    prompt_len: int
    max_total_len: int
    sampling: SamplingSettings


@dataclass(slots=True)
class RowRequest:
    """One request's share of a step: query_len tokens on top of context_len tokens already in the KV cache.

    Never changed once made. Not frozen, which would cost four times as much to make, for every row of every step.
    """

    request_id: str
    epoch: int
    context_len: int
    query_len: int
    verify_len: int
    draft_len: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One step. channel_id empty: no drafter, nothing is published. drafts_from_seq 0: no drafts to verify.

    ahead: plans that may follow before the gateway has this step's verdict; 0: lockstep.
    """

    seq: int
    channel_id: str
    channel_epoch: int
    rows: tuple[RowRequest, ...]
    drafts_from_seq: int
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


Command = Hello | Admission | StepRequest | ReleaseRequest | Unreadable


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is free now. Cached blocks that could be evicted count as free."""

    free_seats: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What this target is. num_blocks: blocks that requests can hold at once."""

    instance_id: str
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_seats: int
    max_step_tokens: int
    eos_token_ids: tuple[int, ...]
    max_verify_len: int


class AdmissionStatus(Enum):
    """How an admission ended."""

    OK = auto()
    NO_SEAT = auto()
    INVALID = auto()


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """cached_len: leading tokens whose KV is here already; always < len(token_ids). field, detail: why INVALID."""

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


class RowStatus(Enum):
    """What became of a row. Only OK rows ran."""

    OK = auto()
    STARVED = auto()
    UNKNOWN = auto()
    SKIPPED = auto()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log softmax of the model's unprocessed logits: the token's own, and the best tokens', best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class RowVerdict:
    """A row's outcome. token_ids: accepted drafts, then the target's own token. context_len: committed, after it.

    Never changed once made; see RowRequest.
    """

    request_id: str
    epoch: int
    status: RowStatus
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    num_drafted: int = 0
    context_len: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step: waiting for drafts, forward, verification, all of it.

    launch_ms: of the host, to put all of it on the device (device execution; 0 where the host takes part in the step
    itself). collective_ms: of the forward, what rank 0 stood in collectives; 0 for a captured step, whose graph
    has no times.
    """

    wait_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0
    launch_ms: float = 0.0
    collective_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank ran of a step. attention_work: query-key pairs, with device execution at most so many."""

    num_tokens: int
    attention_work: int


@dataclass(frozen=True, slots=True)
class StepReply:
    """A step's verdicts, in the plan's order. drafts_missed: drafts were wanted, and the reply did not come in time.
    rank_loads: of each rank, empty on a target of one.
    """

    seq: int
    rows: tuple[RowVerdict, ...]
    capacity: Capacity
    times: StepTimes = field(default_factory=StepTimes)
    drafts_missed: bool = False
    rank_loads: tuple[RankLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultReply:
    """A command could not be carried out; the stream lives on. detail begins with the field at fault."""

    kind: str
    detail: str
    seq: int = 0
    request_id: str = ""


Event = ServiceInfo | AdmissionReply | ReleaseReply | StepReply | FaultReply
