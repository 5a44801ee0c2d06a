"""How does a service get a channel, and which kind of channel can two processes have?

The target chooses the kind among those that the drafter offers, opens, and sends the description; the drafter
attaches by it. There are two interfaces, of one memory layout each: the host's (`open_target_channel`,
`attach_drafter_channel`) and the device's (`open_device_channel`, `attach_device_channel`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.channel.bytes import BytesDrafterEnd, BytesTargetEnd
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.host import host_id
from engine.channel.interface import ChannelSpec
from engine.channel.memory import reap
from engine.channel.shm import ShmDrafterChannel, ShmTargetChannel
from engine.cuda.device import CudaDevice
from engine.errors import ChannelError

_log = logging.getLogger(__name__)

# Best first. `cuda_ipc` is the device interface's, the others are the host's.
KINDS = ("cuda_ipc", "shm", "bytes")
DEVICE_KINDS = ("cuda_ipc",)
HEARTBEAT_DEADLINE_S = 2.0
ATTACH_DEADLINE_S = 10.0


def choose_kind(
    offered: Sequence[str],
    peer_host_id: str,
    own_host_id: str | None = None,
    allowed: Sequence[str] = KINDS,
    device: torch.device | None = None,
    peer_device_uuid: str = "",
) -> str:
    """The first kind offered (by the drafter, best first) that is allowed here and works between it and this process.

    `shm` and `cuda_ipc` need equal host ids (engine/channel/host.py); `cuda_ipc` also needs that `device`, on which
    this process runs its steps without the host (None: it does not), is the peer's or can reach it. ChannelError: none
    works.
    """
    same_host = peer_host_id == (own_host_id or host_id())
    for kind in offered:
        if kind not in allowed:
            continue
        if kind == "bytes" or (kind == "shm" and same_host):
            return kind
        if kind == "cuda_ipc" and same_host and device is not None and _reaches(device, peer_device_uuid):
            return kind
    raise ChannelError(f"kinds: none of {list(offered)} works here (same host: {same_host}, taken: {list(allowed)})")


def kinds_of(kinds: Sequence[str], device: torch.device | None) -> tuple[str, ...]:
    """Those of `kinds` that a process can have: of the device's interface where it runs steps on `device` without the
    host, of the host's where it does not (None).
    """
    return tuple(kind for kind in kinds if (kind in DEVICE_KINDS) == (device is not None))


def device_uuid(device: torch.device) -> str:
    """How a drafter names its device to a target; empty where it has none that memory can be shared on."""
    if device.type != "cuda":
        return ""
    try:
        return CudaDevice(device).uuid
    except ChannelError as error:
        _log.warning("%s", error)
        return ""


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


def open_device_channel(
    spec: ChannelSpec,
    kind: str,
    device: torch.device,
    heartbeat_deadline_s: float = HEARTBEAT_DEADLINE_S,
    attach_deadline_s: float = ATTACH_DEADLINE_S,
) -> CudaIpcTargetEnd:
    """As open_target_channel, for a target whose steps run on `device` without the host."""
    if kind != "cuda_ipc":
        raise ChannelError(_refusal(kind))
    reap()
    return CudaIpcTargetEnd(spec, CudaDevice(device), heartbeat_deadline_s, attach_deadline_s)


def describe(channel: ShmTargetChannel | BytesTargetEnd | CudaIpcTargetEnd) -> ChannelDescription:
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


def attach_device_channel(
    description: ChannelDescription, device: torch.device, heartbeat_deadline_s: float = HEARTBEAT_DEADLINE_S
) -> CudaIpcDrafterEnd:
    """As attach_drafter_channel, for a drafter whose steps run on `device` without the host."""
    if description.kind != "cuda_ipc":
        raise ChannelError(_refusal(description.kind))
    return CudaIpcDrafterEnd(description, CudaDevice(device), heartbeat_deadline_s)


def _reaches(device: torch.device, uuid: str) -> bool:
    if not uuid:
        return False
    try:
        return CudaDevice(device).can_reach(uuid)
    except ChannelError as error:
        _log.warning("%s", error)
        return False


def _refusal(kind: str) -> str:
    if kind in KINDS:
        return f"kind: {kind} is of the other interface: cuda_ipc of the device's, shm and bytes of the host's"
    return f"kind: {kind!r} is not one of {', '.join(KINDS)}"
