"""What does every way of drafting look like from outside?

A speculator owns whatever it needs to draft (weights, KV, indices), per seat. It is told of admissions and releases,
and once a step it gets the target's ring entry and proposes tokens. One thread calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from drafter_service.residency import Resident
from engine.channel.interface import ChannelSpec, RingEntry

MetadataSource = Literal["build", "reuse"]


@dataclass(frozen=True, slots=True)
class ChannelNeeds:
    """What a speculator asks of a channel.

    hidden_layers: target layers whose output it reads. hidden_width: of those, side by side. vocab_size: of the target,
    0: any. block_size, num_blocks: of its own KV cache (0: none).
    """

    hidden_layers: tuple[int, ...] = ()
    hidden_width: int = 0
    max_draft_len: int = 0
    draft_probs: bool = False
    metadata_source: MetadataSource = "build"
    block_size: int = 0
    num_blocks: int = 0
    vocab_size: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One row of a ring entry that ran and whose request is resident here.

    index: its row in the entry. query_start: its first token in the entry. context_len: before the step.
    anchor, next_prompt_token: -1 where there is none. draft_len: tokens wanted, already cut to what the target can use.
    """

    index: int
    resident: Resident
    query_start: int
    query_len: int
    context_len: int
    num_rejected: int
    anchor: int
    next_prompt_token: int
    draft_len: int

    @property
    def committed_len(self) -> int:
        """Tokens whose KV counts after the step; also the anchor's position."""
        return self.context_len + self.query_len - self.num_rejected


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One step as the drafter sees it.

    entry: a private copy; `hidden`, and the target's slots and tables, are only there for who needs them.
    target_vocab: ids below it are the target's. wants_probs: the channel takes probabilities.
    """

    entry: RingEntry
    rows: tuple[DraftRow, ...]
    target_vocab: int
    wants_probs: bool = False


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """tokens: [R, K] int64 over all R rows of the entry, -1 where there is no draft (a row's drafts end there).

    probs: [R, K, V] float32 or None; has_probs: [R] bool or None. metadata_builds, metadata_launches: in this proposal.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    has_probs: torch.Tensor | None = None
    num_drafted: int = 0
    metadata_builds: int = 0
    metadata_launches: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0


class Speculator(Protocol):
    """One way of drafting."""

    method: str

    @property
    def needs(self) -> ChannelNeeds:
        """What a channel must offer."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """KV blocks free or evictable; 0 for a method without KV."""
        ...

    def check_channel(self, spec: ChannelSpec) -> None:
        """ChannelError when this channel cannot be drafted for."""
        ...

    def admit(self, resident: Resident) -> int:
        """Take a request on its (empty) seat and return its cached_len. CapacityError: no block for it now."""
        ...

    def release(self, resident: Resident) -> None:
        """Forget a request; its seat is empty after it. Idempotent."""
        ...

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Follow the step and draft. Rows that cannot be drafted for get -1 and may turn their resident COLD or OFF."""
        ...

    def check_integrity(self) -> None:
        """IntegrityError when blocks or seats don't add up."""
        ...


def empty_proposal(num_rows: int) -> DraftProposal:
    """No draft for any row."""
    return DraftProposal(torch.empty((num_rows, 0), dtype=torch.int64))
