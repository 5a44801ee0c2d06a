"""Which channels to targets are open, and whose are they?

A channel belongs to the gateway stream that had it opened: its plans number the steps. It ends with that stream, with a
newer channel to the same target, or with the service. The device thread owns the list; attaching and detaching are RPCs
and happen elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from drafter_service.messages import StepRequest
from engine.channel.device import DeviceDrafterEnd
from engine.channel.interface import DrafterChannel
from kernels.forms import Forms


@dataclass(frozen=True, slots=True)
class AttachedChannel:
    """A channel as attaching gave it: of the device's interface where steps run without the host.

    max_model_len: the target's. detach: closes our end, tells the target; quick.
    """

    channel: DrafterChannel | DeviceDrafterEnd
    target_address: str
    target_instance_id: str
    max_model_len: int
    detach: Callable[[], None]

    @property
    def host_channel(self) -> DrafterChannel:
        """The channel, where steps run through the host."""
        assert self.device_channel is None
        return cast(DrafterChannel, self.channel)

    @property
    def device_channel(self) -> DeviceDrafterEnd | None:
        """The channel, where steps run without the host; None where they run through it."""
        return cast(DeviceDrafterEnd, self.channel) if hasattr(self.channel, "wait_entry") else None


@dataclass(frozen=True, slots=True)
class AttachOutcome:
    """How attaching to a target ended: a channel, or why there is none."""

    target_address: str
    attached: AttachedChannel | None
    detail: str = ""


@dataclass(slots=True)
class ChannelLink:
    """An open channel in use. missed: plans whose ring entry did not come in time and may still be in the ring. forms:
    launches over its entries; they hold its memory.
    """

    stream_id: int
    attached: AttachedChannel
    forms: Forms = field(default_factory=Forms)
    missed: deque[StepRequest] = field(init=False)

    def __post_init__(self) -> None:
        # The newest of `depth` entries is the present step's.
        self.missed = deque(maxlen=max(self.attached.channel.spec.depth - 1, 1))


class ChannelLinks:
    """Owner of the open channels. Used by the device thread only."""

    def __init__(self) -> None:
        self._links: dict[str, ChannelLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def find(self, channel_id: str, epoch: int, stream_id: int) -> ChannelLink | None:
        """The channel under that name and epoch, if it is this stream's."""
        link = self.get(channel_id, stream_id)
        return link if link is not None and link.attached.channel.spec.epoch == epoch else None

    def get(self, channel_id: str, stream_id: int) -> ChannelLink | None:
        """The channel under that name, of whatever epoch, if it is this stream's."""
        link = self._links.get(channel_id)
        return link if link is not None and link.stream_id == stream_id else None

    def add(self, stream_id: int, attached: AttachedChannel) -> list[str]:
        """Take a new channel in use. Returns the ids of the channels of this stream and target that it replaced."""
        replaced = [
            channel_id
            for channel_id, link in self._links.items()
            if link.stream_id == stream_id and link.attached.target_address == attached.target_address
        ]
        channel_id = attached.channel.spec.channel_id
        if channel_id in self._links and channel_id not in replaced:
            replaced.append(channel_id)
        for old in replaced:
            self._links.pop(old).attached.detach()
        self._links[channel_id] = ChannelLink(stream_id, attached)
        return replaced

    def drop_stream(self, stream_id: int) -> None:
        """The stream has ended: give its channels up."""
        for channel_id, link in list(self._links.items()):
            if link.stream_id == stream_id:
                del self._links[channel_id]
                link.attached.detach()

    def drop_all(self) -> None:
        """Give every channel up."""
        for link in self._links.values():
            link.attached.detach()
        self._links.clear()
