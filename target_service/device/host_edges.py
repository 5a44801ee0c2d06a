"""How does device execution use a channel that the host reads and writes?

`shm` and `bytes` behind the device interface: a step's entry is put together on the device, brought to the host and
published there; a reply is awaited on the host and brought to the device. Each of the two waits, so steps do not run
ahead of the host here. What there is when target and drafter share no GPU; the tests of device execution on a CPU use
it too.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from engine.channel.bytes import BytesTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.device import ReplyViews
from engine.channel.interface import ReplyEntry, RingEntry
from engine.channel.layout import plan_layout
from engine.channel.shm import ShmTargetChannel
from engine.channel.views import EntryViews, region_tensors

SEQ, EPOCH, NUM_ROWS, NUM_TOKENS = range(4)
_BY_ROW = frozenset(
    ("seq_lens", "seats", "num_sampled", "num_rejected", "anchors", "next_prompt_tokens", "temperatures", "seeds")
)
_COUNTS = frozenset(("seq", "num_rows", "num_tokens"))


class HostEdges:
    """A DeviceTargetEnd over a TargetChannel, which it owns. One entry of each kind lies on the device."""

    def __init__(self, end: ShmTargetChannel | BytesTargetEnd, device: torch.device) -> None:
        self.spec = end.spec
        self.kind = end.kind
        self.device = device
        self.host = end
        layout = plan_layout(replace(end.spec, depth=1))
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # steps run on another stream than whoever attaches
        self._views = EntryViews(replace(end.spec, depth=1), region_tensors(memory, layout))

    def describe(self) -> ChannelDescription:
        """What the drafter needs to attach."""
        return self.host.describe()

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """See DeviceTargetEnd.ring."""
        return self._views.ring(seq)

    def reply(self, seq: int) -> ReplyViews:
        """See DeviceTargetEnd.reply."""
        return self._views.reply(seq)

    def wait_reply(self, seq: int, deadline_s: float) -> None:
        """See DeviceTargetEnd.wait_reply."""
        self.take(seq, deadline_s)

    def take(self, seq: int, deadline_s: float) -> bool:
        """Wait for the reply here and now, and enqueue its copy. False: it did not come."""
        reply = self.host.take_reply(seq, deadline_s)
        views = self._views.reply(seq)
        if reply is None:
            views.header.zero_()
        else:
            self._put(reply, views)
        return reply is not None

    def release_waits(self) -> None:
        """Nothing waits behind the host's back."""

    def publish(self, seq: int) -> None:
        """Bring the entry to the host, which waits for the device, and publish it there."""
        header, entry = self._views.ring(seq)
        counts = header[: NUM_TOKENS + 1].tolist()
        num_rows, num_tokens = counts[NUM_ROWS], counts[NUM_TOKENS]
        out = self.host.begin(seq, num_rows, num_tokens)
        for field in fields(RingEntry):
            if field.name in _COUNTS:
                continue
            source, place = getattr(entry, field.name), getattr(out, field.name)
            if source is None or place is None:
                continue
            if field.name == "query_start_loc":
                count = num_rows + 1
            elif field.name in _BY_ROW or field.name == "block_tables":
                count = num_rows
            else:
                count = num_tokens
            place.copy_(source[:count])
        self.host.publish(seq)

    def peer_alive(self) -> bool:
        """See TargetChannel.peer_alive."""
        return self.host.peer_alive()

    @property
    def closed(self) -> bool:
        """See TargetChannel.closed."""
        return self.host.closed

    def close(self) -> None:
        """See TargetChannel.close."""
        self.host.close()

    def _put(self, reply: ReplyEntry, views: ReplyViews) -> None:
        num_rows = reply.num_rows
        views.tokens[:num_rows].copy_(reply.tokens)
        if views.probs is not None and views.has_probs is not None:
            if reply.probs is not None and reply.has_probs is not None:
                views.probs[:num_rows].copy_(reply.probs)
                views.has_probs[:num_rows].copy_(reply.has_probs)
            else:
                views.has_probs.zero_()
        header = torch.zeros(views.header.shape[0], dtype=torch.int64)
        header[SEQ], header[EPOCH], header[NUM_ROWS] = reply.seq, self.spec.epoch, num_rows
        views.header.copy_(header)
