"""How do target and drafter talk when one thread runs both of them on one stream?

Kind `local`: both ends of the device interface over the same tensors, on any device. There is nothing to wait for,
because the caller enqueues a step's target part, then its drafter part, and the stream keeps that order (on the CPU,
the calls themselves do). For measuring what the split costs, and for tests.
"""

from __future__ import annotations

import torch

from engine.channel.device import ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.layout import plan_layout
from engine.channel.views import EntryViews, region_tensors
from engine.errors import ChannelError

KIND = "local"


class LocalChannel:
    """One channel in one process. `target` and `drafter` are its ends; closing either closes both."""

    def __init__(self, spec: ChannelSpec, device: torch.device) -> None:
        """Allocates, zeroed, so that every entry is absent. ChannelError names the field of the spec that is wrong."""
        layout = plan_layout(spec)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        shared = _Shared(EntryViews(spec, region_tensors(memory, layout)))
        self.target = LocalTargetEnd(spec, device, shared)
        self.drafter = LocalDrafterEnd(spec, device, shared)


class _Shared:
    def __init__(self, views: EntryViews) -> None:
        self.views = views
        self.closed = False


class _LocalEnd:
    def __init__(self, spec: ChannelSpec, device: torch.device, shared: _Shared) -> None:
        self.spec = spec
        self.kind = KIND
        self.device = device
        self._shared = shared
        self._published = 0

    @property
    def closed(self) -> bool:
        """Whether either end was closed."""
        return self._shared.closed

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """See DeviceTargetEnd.ring."""
        self._check_open()
        return self._shared.views.ring(seq)

    def reply(self, seq: int) -> ReplyViews:
        """See DeviceTargetEnd.reply."""
        self._check_open()
        return self._shared.views.reply(seq)

    def peer_alive(self) -> bool:
        """Whether the channel is open: both ends live and die together."""
        return not self._shared.closed

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._shared.closed = True

    def _check_open(self) -> None:
        if self._shared.closed:
            raise ChannelError(f"channel {self.spec.channel_id} is closed")

    def _advance(self, seq: int) -> None:
        self._check_open()
        if seq <= self._published:
            raise ChannelError(f"seq: step {seq} is not after step {self._published}, already published")
        self._published = seq


class LocalTargetEnd(_LocalEnd):
    """See DeviceTargetEnd."""

    def wait_reply(self, seq: int, deadline_s: float) -> None:
        """Nothing to do: what the drafter enqueued before, comes before."""
        self._check_open()

    def release_waits(self) -> None:
        """Nothing waits."""

    def publish(self, seq: int) -> None:
        """Nothing but the check of the number: what the drafter enqueues after this, comes after."""
        self._advance(seq)


class LocalDrafterEnd(_LocalEnd):
    """See DeviceDrafterEnd."""

    def wait_entry(self, seq: int, deadline_s: float) -> None:
        """Nothing to do: what the target enqueued before, comes before."""
        self._check_open()

    def publish_reply(self, seq: int) -> None:
        """Nothing but the check of the number: what the target enqueues after this, comes after."""
        self._advance(seq)
