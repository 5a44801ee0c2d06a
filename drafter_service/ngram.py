"""How does a request's own text draft for it?

Prompt lookup (Saxena 2023): find where the request's last tokens stood before, and propose what followed them there.
The longest suffix of max_n .. min_n tokens that occurred before wins, its most recent occurrence counts. An index per
request grows with its tokens, so that a step costs the new tokens only, never the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from drafter_service.residency import Resident, Warmth
from drafter_service.speculator import ChannelNeeds, DraftBatch, DraftProposal, DraftRow
from engine.channel.interface import ChannelSpec


class NgramIndex:
    """Where each n-gram of one growing text was last followed by a token.

    The text is the caller's, who only ever appends to it: `extend` takes up what is new (a text that became shorter is
    indexed again). Memory: one entry per distinct n-gram, at most max_n - min_n + 1 a token.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # tokens [0, _indexed) have their n-grams in the index

    def extend(self, tokens: Sequence[int]) -> None:
        """Take up tokens that are new since the last call. An n-gram is indexed once the token after it is known."""
        if len(tokens) <= self._indexed:
            self._next.clear()
            self._indexed = 0
        for end in range(self._indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._indexed = max(len(tokens) - 1, 0)

    def draft(self, tokens: Sequence[int], num: int) -> list[int]:
        """Up to `num` tokens that may follow `tokens` (taken up already). Empty: no suffix occurred before.

        Where the copy reaches the end of the text it goes on with what it has copied: a text that repeats itself with
        any period is continued in full.
        """
        for size in self._sizes:
            if size >= len(tokens):
                continue
            start = self._next.get(tuple(tokens[len(tokens) - size :]))
            if start is None:
                continue
            drafts: list[int] = []
            for offset in range(num):
                source = start + offset
                drafts.append(tokens[source] if source < len(tokens) else drafts[source - len(tokens)])
            return drafts
        return []


class NgramSpeculator:
    """Drafts from each request's own tokens. Has no weights, KV or blocks."""

    method = "ngram"

    def __init__(self, min_n: int, max_n: int, max_draft_len: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._max_draft_len = max_draft_len
        self._indices: dict[int, NgramIndex] = {}

    @property
    def needs(self) -> ChannelNeeds:
        """See Speculator.needs."""
        return ChannelNeeds(max_draft_len=self._max_draft_len)

    @property
    def num_free_blocks(self) -> int:
        """See Speculator.num_free_blocks."""
        return 0

    def check_channel(self, spec: ChannelSpec) -> None:
        """See Speculator.check_channel: any channel will do."""

    def admit(self, resident: Resident) -> int:
        """See Speculator.admit. All tokens but the last are "cached": there is nothing to compute."""
        index = NgramIndex(self._min_n, self._max_n)
        index.extend(resident.tokens)
        self._indices[resident.seat] = index
        return max(len(resident.tokens) - 1, 0)

    def release(self, resident: Resident) -> None:
        """See Speculator.release."""
        self._indices.pop(resident.seat, None)

    def check_integrity(self) -> None:
        """See Speculator.check_integrity: nothing to add up."""

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """See Speculator.propose."""
        started = time.perf_counter()
        drafts = {row.index: self._draft(row) for row in batch.rows}
        longest = max((len(tokens) for tokens in drafts.values()), default=0)
        table = torch.full((batch.entry.num_rows, longest), -1, dtype=torch.int64)
        for index, tokens in drafts.items():
            table[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        num_drafted = sum(len(tokens) for tokens in drafts.values())
        return DraftProposal(table, num_drafted=num_drafted, draft_ms=(time.perf_counter() - started) * 1e3)

    def _draft(self, row: DraftRow) -> list[int]:
        resident = row.resident
        if resident.warmth is not Warmth.WARM:
            return []
        if row.committed_len >= len(resident.tokens):
            resident.warmth = Warmth.COLD  # steps were missed: tokens are missing
            return []
        if row.anchor < 0:
            return []
        index = self._indices[resident.seat]
        index.extend(resident.tokens)
        return index.draft(resident.tokens, row.draft_len) if row.draft_len > 0 else []
