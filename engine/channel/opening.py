"""How does a service get a channel, and which kind of channel can two processes have?

The target chooses the kind among those that the drafter offers, opens, and sends the description; the drafter
attaches by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.channel.bytes import BytesDrafterEnd, BytesTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.host import host_id
from engine.channel.interface import ChannelSpec
from engine.channel.memory import reap
from engine.channel.shm import ShmDrafterChannel, ShmTargetChannel
from engine.errors import ChannelError

# What each end can do here, best first; `cuda_ipc` arrives with the GPU data plane and is refused until then.
KINDS = ("shm", "bytes")
HEARTBEAT_DEADLINE_S = 2.0
ATTACH_DEADLINE_S = 10.0


def choose_kind(
    offered: Sequence[str], peer_host_id: str, own_host_id: str | None = None, allowed: Sequence[str] = KINDS
) -> str:
    """The first kind offered (by the drafter, best first) that is allowed here and works between it and this process.

    `shm` needs equal host ids (engine/channel/host.py). ChannelError: none works.
    """
    same_host = peer_host_id == (own_host_id or host_id())
    for kind in offered:
        if kind in allowed and (kind == "bytes" or (kind == "shm" and same_host)):
            return kind
    raise ChannelError(f"kinds: none of {list(offered)} works here (same host: {same_host}, taken: {list(allowed)})")


def open_target_channel(
    spec: ChannelSpec,
    kind: str,
    heartbeat_deadline_s: float = HEARTBEAT_DEADLINE_S,
    attach_deadline_s: float = ATTACH_DEADLINE_S,
    poison: bool = False,
) -> ShmTargetChannel | BytesTargetEnd:
    """Make a channel. The caller owns it and must `close` it.

    attach_deadline_s: how long a drafter that never came counts as alive. poison: `begin` fills the entry with 0xA5
    bytes, for tests of whoever must fill it (`shm`). Objects that dead processes left in shared memory are removed
    first. ChannelError names the field of the spec, or the kind, that does not work.
    """
    if kind == "shm":
        reap()
        return ShmTargetChannel(spec, heartbeat_deadline_s, attach_deadline_s, poison)
    if kind == "bytes":
        return BytesTargetEnd(spec, attach_deadline_s)
    raise ChannelError(_refusal(kind))


def describe(channel: ShmTargetChannel | BytesTargetEnd) -> ChannelDescription:
    """What the drafter needs to attach to `channel`; travels as ChannelDescriptor in AttachReply."""
    return channel.describe()


def attach_drafter_channel(
    description: ChannelDescription,
    heartbeat_deadline_s: float = HEARTBEAT_DEADLINE_S,
    attach_deadline_s: float = ATTACH_DEADLINE_S,
) -> ShmDrafterChannel | BytesDrafterEnd:
    """Attach to the channel described, once. The caller must `close` it. ChannelError names what does not fit.

    attach_deadline_s: how long the target counts as alive before the Exchange stream stands (`bytes`).
    """
    if description.kind == "shm":
        return ShmDrafterChannel(description, heartbeat_deadline_s)
    if description.kind == "bytes":
        return BytesDrafterEnd(description, attach_deadline_s)
    raise ChannelError(_refusal(description.kind))


def _refusal(kind: str) -> str:
    if kind == "cuda_ipc":
        return "kind: cuda_ipc arrives with the GPU data plane; use shm or bytes"
    return f"kind: {kind!r} is not one of {', '.join(KINDS)}"
