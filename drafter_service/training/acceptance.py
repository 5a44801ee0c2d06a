"""How many drafts would the services have accepted while this text was written?

For a text that the target wrote, greedily or sampled with the services' own rule for greedy drafts (accepted iff the
token drawn from the target is the draft), a draft is accepted exactly when it is the text's next token. So acceptance
from every position follows from one unrolled pass, and a walk from anchor to anchor gives the steps that a service
would have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.corpus import Batch, Conversation, Ints, make_batch
from drafter_service.training.target_view import TargetView, chain_starts, drafted_tokens, proposed_tokens
from drafter_service.training.unroll import unroll


@dataclass(slots=True)
class AcceptanceCount:
    """Sums over verify steps. proposed[i], accepted[i]: steps that offered, and took, an (i + 1)-th draft."""

    draft_len: int
    steps: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proposed = self.proposed or [0] * self.draft_len
        self.accepted = self.accepted or [0] * self.draft_len

    def add_step(self, offered: int, accepted: int, committed: int) -> None:
        """One verify step: `offered` drafts, the first `accepted` of them taken, `committed` tokens after trimming."""
        self.steps += 1
        self.tokens += committed
        for index in range(offered):
            self.proposed[index] += 1
            self.accepted[index] += index < accepted

    def merge(self, other: AcceptanceCount) -> None:
        """Add another count of the same draft_len."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.proposed = [a + b for a, b in zip(self.proposed, other.proposed, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    @property
    def mean_accepted_len(self) -> float:
        """Tokens committed per verify step, the target's own included; 1 where nothing was verified."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def per_position(self) -> list[float]:
        """Share of steps that accepted draft i (and so all before it)."""
        return [took / max(1, offered) for took, offered in zip(self.accepted, self.proposed, strict=True)]


@torch.no_grad()
def accepted_lengths(head: Eagle3Head, target: TargetView, batch: Batch, draft_len: int, device: torch.device) -> Ints:
    """[B, L]: how many of draft_len greedy drafts begun at each position agree with the text; -1 where none would
    begin.

    head takes captured states as they are (see `fold_scale`). The drafting at t has the anchor at t + 1.
    """
    token_ids = torch.from_numpy(batch.token_ids).to(device)
    chains = chain_starts(batch, draft_len, device)
    lengths = torch.zeros_like(chains.starts)
    if chains.starts.numel():
        _, captured = target.run(token_ids)
        alive = torch.ones_like(chains.valid[:, 0])
        for step, output in enumerate(unroll(head, head.fuse(captured), token_ids, draft_len)):
            drafts = drafted_tokens(head, head.logits(output[chains.starts]))
            alive = alive & chains.valid[:, step] & (drafts == proposed_tokens(token_ids, chains.starts, step))
            lengths += alive
    result = np.full(batch.token_ids.size, -1, dtype=np.int64)
    result[chains.starts.cpu().numpy()] = lengths.cpu().numpy()
    return result.reshape(batch.token_ids.shape)


def walk(lengths: Ints, start: int, end: int, draft_len: int, count: AcceptanceCount) -> None:
    """Add the verify steps of one answer, tokens start .. end - 1 of a text, to `count`.

    lengths: [L] of `accepted_lengths`. The first token comes from the prompt's own step. Drafts past the answer's end
    are offered but cannot be told right from wrong; what would follow the end is trimmed, so they are counted as not
    offered.
    """
    anchor = start
    while anchor < end - 1:
        left = end - 1 - anchor
        offered = min(draft_len, left)
        accepted = min(offered, max(0, int(lengths[anchor - 1])))
        committed = min(accepted + 1, left)
        count.add_step(offered, accepted, committed)
        anchor += committed


def measure(
    head: Eagle3Head,
    target: TargetView,
    conversations: Sequence[Conversation],
    draft_len: int,
    max_len: int,
    device: torch.device,
    batch_tokens: int = 16384,
) -> list[AcceptanceCount]:
    """One count for each conversation, over all its answers, in order."""
    counts = [AcceptanceCount(draft_len) for _ in conversations]
    for group in _groups(conversations, batch_tokens, max_len):
        batch = make_batch([conversations[index] for index in group], max_len)
        lengths = accepted_lengths(head, target, batch, draft_len, device)
        for row, index in enumerate(group):
            for start, end in conversations[index].spans:
                walk(lengths[row], start, min(end, int(batch.lens[row])), draft_len, counts[index])
    return counts


def total(counts: Iterable[AcceptanceCount], draft_len: int) -> AcceptanceCount:
    """All counts together."""
    everything = AcceptanceCount(draft_len)
    for count in counts:
        everything.merge(count)
    return everything


def _groups(conversations: Sequence[Conversation], batch_tokens: int, max_len: int) -> list[list[int]]:
    order = sorted(range(len(conversations)), key=lambda index: conversations[index].tokens.size)
    groups: list[list[int]] = []
    for index in order:
        length = min(conversations[index].tokens.size, max_len)
        if groups and length * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
