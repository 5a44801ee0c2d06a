"""What passes between one target and one drafter, and which two ends is it seen from?

The channel: a control page (two step counters, heartbeats, state, epoch), `depth` ring entries written by the target,
`depth` reply entries written by the drafter. Entry of step `seq` lies at index `seq % depth` and carries its tag
(epoch, seq); a reader that finds another tag, before or after it copied, treats the entry as absent. The target
allocates and exports everything; the drafter maps it, so a drafter's death leaves the target nothing dangling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """Sizes both ends agree on. Everything else about the memory follows from it."""

    channel_id: str
    epoch: int
    depth: int
    max_rows: int
    max_tokens: int
    max_draft_len: int
    hidden_width: int  # A * H; 0: no hidden states
    hidden_dtype: torch.dtype
    vocab_size: int
    max_blocks_per_row: int
    block_size: int
    num_blocks: int
    draft_probs: bool


@dataclass(frozen=True, slots=True)
class RingEntry:
    """Step `seq` as the target saw it, global order. Views into the channel's memory, or copies (`bytes`).

    R rows, T tokens. Rows that did not run have query_len 0 (flat query_start_loc) and num_sampled = num_rejected = 0.

    hidden: [T, A*H] of ChannelSpec.hidden_dtype, or None; row for position p holds the hidden state of p.
    positions: [T] int64; input_ids: [T] int64 (an absent draft is 0 here and always among the rejected).
    query_start_loc: [R + 1] int32; seq_lens: [R] int32, before rejection (context_len + query_len).
    seats: [R] int32, the target's. num_sampled, num_rejected: [R] int32 (query tokens whose KV does not count).
    anchors: [R] int64, last sampled token, -1 where nothing was sampled.
    next_prompt_tokens: [R] int64, the prompt token after this chunk, -1 for rows that sampled.
    temperatures: [R] float32; seeds: [R] int64 (bit pattern of the uint64).
    slot_mapping: [T] int64 and block_tables: [R, max_blocks_per_row] int32, the target's own, for `metadata_source:
        reuse`.
    """

    seq: int
    num_rows: int
    num_tokens: int
    hidden: torch.Tensor | None
    positions: torch.Tensor
    input_ids: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    seats: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    anchors: torch.Tensor
    next_prompt_tokens: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReplyEntry:
    """What the drafter proposes after step `seq`; views into the channel's memory, or copies (tokens always).

    tokens: [R, max_draft_len] int64, -1 where there is none (a row's drafts end at its first -1); any id that is not in
        the vocabulary has been replaced by -1.
    probs: [R, max_draft_len, V] float32, the distribution each draft was drawn from, or None; a row whose draft was
        chosen greedily has has_probs[row] False and its probs are not read. has_probs: [R] bool, or None.
    """

    seq: int
    num_rows: int
    tokens: torch.Tensor
    probs: torch.Tensor | None
    has_probs: torch.Tensor | None


class TargetChannel(Protocol):
    """The target's end; it owns the memory. One thread steps (begin, publish, take_reply); any thread may close."""

    spec: ChannelSpec
    kind: str

    def begin(self, seq: int, num_rows: int, num_tokens: int) -> RingEntry:
        """Invalidate the entry that step `seq` reuses and return its tensors, cut to size, to be filled in place.

        Every tensor must be filled: what is not, holds an older step's values. A step begun and not published is given
        up by the next `begin`. ChannelError: seq not above the last one published, more rows than max_rows, more tokens
        than max_tokens, or the channel is closed.
        """
        ...

    def publish(self, seq: int) -> None:
        """Tag the entry and advance target_seq. Data first, then tag, then the counter. ChannelError: not begun."""
        ...

    def take_reply(self, seq: int, deadline_s: float) -> ReplyEntry | None:
        """Wait until the drafter published its reply to step `seq`.

        None: deadline passed, closed, peer gone (noticed well before the deadline), or another tag. deadline_s 0 looks
        without waiting.
        """
        ...

    def peer_alive(self) -> bool:
        """Whether the drafter's heartbeat is younger than the heartbeat deadline, and it has not detached.

        A drafter that has not attached yet counts as alive for a while after the channel was opened.
        """
        ...

    @property
    def closed(self) -> bool:
        """Whether the channel has ended: `close` was called, or its transport broke."""
        ...

    def close(self) -> None:
        """Free the memory and release whoever waits on either end (state = CLOSED). Idempotent.

        Tensors already handed out stay readable; what they hold means nothing any more.
        """
        ...


class DrafterChannel(Protocol):
    """The drafter's end: a mapping of the target's memory. One thread steps; any thread may close."""

    spec: ChannelSpec
    kind: str

    def take_entry(self, seq: int, deadline_s: float) -> RingEntry | None:
        """Wait for step `seq`.

        None: deadline passed, channel closed, target gone, or the entry was overwritten. deadline_s 0 looks without
        waiting.
        """
        ...

    def entry_intact(self, seq: int) -> bool:
        """Whether the entry taken is still step `seq`'s: to be asked after reading it and before trusting it."""
        ...

    def publish_reply(
        self, seq: int, tokens: torch.Tensor, probs: torch.Tensor | None, has_probs: torch.Tensor | None
    ) -> None:
        """Publish the reply to step `seq`; missing columns are filled with -1.

        tokens: [R, k <= max_draft_len] int64. probs: [R, k, V] float32 or None; has_probs: [R] bool, None meaning every
        row when there are probs. A drafter that has nothing to propose publishes k = 0: the target would otherwise wait
        until its deadline. ChannelError: seq not above the last one published, sizes past the channel's, probs on a
        channel without them, or the channel is closed.
        """
        ...

    def peer_alive(self) -> bool:
        """Whether the target's heartbeat is younger than the heartbeat deadline, and the channel is open."""
        ...

    def close(self) -> None:
        """Detach; never unlinks. Idempotent."""
        ...
