"""The memory that target and drafter share, and the ways to wait on it."""

from engine.channel.bytes import BytesDrafterEnd, BytesTargetEnd, EntryMessage
from engine.channel.description import ChannelDescription, RegionDescription
from engine.channel.host import host_id
from engine.channel.interface import ChannelSpec, DrafterChannel, ReplyEntry, RingEntry, TargetChannel
from engine.channel.memory import reap
from engine.channel.opening import KINDS, attach_drafter_channel, choose_kind, describe, open_target_channel

__all__ = [
    "KINDS",
    "BytesDrafterEnd",
    "BytesTargetEnd",
    "ChannelDescription",
    "ChannelSpec",
    "DrafterChannel",
    "EntryMessage",
    "RegionDescription",
    "ReplyEntry",
    "RingEntry",
    "TargetChannel",
    "attach_drafter_channel",
    "choose_kind",
    "describe",
    "host_id",
    "open_target_channel",
    "reap",
]
