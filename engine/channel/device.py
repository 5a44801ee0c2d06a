"""What do the two ends of a channel look like to work that is enqueued on a device and never waits on the host?

The device interface. Everything here returns at once: waits and publications are put on the device's current stream,
in order with the kernels around them, and nothing is read back. Entries are handed out at full size, since only the
device knows how much of them a step fills; the header says it.

Headers are [8] int64: `[seq, epoch, num_rows, num_tokens, 0...]` (layout.SEQ and so on), seq 0 meaning no valid entry.
The first kernel of a writer zeroes the seq of the entry that it is going to overwrite, its last one writes the tag, and
then the counter is published. A reader's kernels compare the tag when they read and once more at their end: any other
tag makes the entry absent. Nothing in an entry is believed: what is used as an index is clamped or dropped first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.channel.interface import ChannelSpec, RingEntry


@dataclass(frozen=True, slots=True)
class ReplyViews:
    """A reply entry's memory at full size; both ends use it.

    header: [8] int64. tokens: [max_rows, max_draft_len] int64, -1 where there is none. probs: [max_rows, max_draft_len,
    V] float32 and has_probs: [max_rows] bool, both None on a channel without draft probabilities.
    """

    header: torch.Tensor
    tokens: torch.Tensor
    probs: torch.Tensor | None
    has_probs: torch.Tensor | None


class DeviceTargetEnd(Protocol):
    """The target's end; it owns the memory. One thread steps; any thread may close.

    `ring`, `reply`, `wait_reply` and `publish` raise ChannelError once this end was closed.
    """

    spec: ChannelSpec
    kind: str
    device: torch.device

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """Header [8] int64 and tensors of the entry of step `seq`, to be written on `device`.

        Views at full size: num_rows and num_tokens of the RingEntry are the channel's max_rows and max_tokens. The same
        memory every `depth` steps.
        """
        ...

    def reply(self, seq: int) -> ReplyViews:
        """The reply entry of step `seq`, to be read on `device` after `wait_reply`."""
        ...

    def wait_reply(self, seq: int, deadline_s: float) -> None:
        """Enqueue on the current stream: wait until the drafter has published its reply to step `seq`.

        The wait ends without a reply when deadline_s has passed since step `seq` was published, when the drafter is
        gone, or when the channel is closed; the reply's tag tells. deadline_s 0: nothing is waited for. Not to be
        captured in a graph.
        """
        ...

    def release_waits(self) -> None:
        """End the waits enqueued so far, without replies: the drafter has missed one, and the steps behind it were
        launched before anybody could know. One deadline is then enough for all of them.
        """
        ...

    def publish(self, seq: int) -> None:
        """Enqueue on the current stream, after all earlier work and a memory barrier: step `seq` can be read.

        ChannelError: seq is not above the last one published. Not to be captured in a graph.
        """
        ...

    def peer_alive(self) -> bool:
        """As TargetChannel.peer_alive."""
        ...

    @property
    def closed(self) -> bool:
        """As TargetChannel.closed."""
        ...

    def close(self) -> None:
        """Release every wait, on either end, and give the memory up. Idempotent; does not wait for the device.

        The memory itself lives until the last tensor made of it is gone, and the drafter has let go of it or is dead.
        """
        ...


class DeviceDrafterEnd(Protocol):
    """The drafter's end: a mapping of the target's memory. One thread steps; any thread may close.

    `ring`, `reply`, `wait_entry` and `publish_reply` raise ChannelError once this end was closed.
    """

    spec: ChannelSpec
    kind: str
    device: torch.device

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """The entry of step `seq`, to be read on `device` after `wait_entry`; as DeviceTargetEnd.ring."""
        ...

    def reply(self, seq: int) -> ReplyViews:
        """The reply entry of step `seq`, to be written on `device`."""
        ...

    def wait_entry(self, seq: int, deadline_s: float) -> None:
        """Enqueue on the current stream: wait until the target has published step `seq`.

        The wait ends without an entry when deadline_s has passed since this call, when the target is gone, or when the
        channel is closed; the entry's tag tells. deadline_s 0: nothing is waited for. Not to be captured in a graph.
        """
        ...

    def publish_reply(self, seq: int) -> None:
        """Enqueue on the current stream, after all earlier work and a memory barrier: the reply to `seq` can be read.

        ChannelError: seq is not above the last one published. Not to be captured in a graph.
        """
        ...

    def peer_alive(self) -> bool:
        """As DrafterChannel.peer_alive."""
        ...

    @property
    def closed(self) -> bool:
        """Whether either end has closed."""
        ...

    def close(self) -> None:
        """Release every wait of this end and detach. Idempotent; does not wait for the device."""
        ...
