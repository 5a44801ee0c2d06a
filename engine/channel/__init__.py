"""The memory that target and drafter share, and the ways to wait on it."""

from engine.channel.bytes import BytesDrafterEnd, BytesTargetEnd, EntryMessage
from engine.channel.description import ChannelDescription, RegionDescription
from engine.channel.device import DeviceDrafterEnd, DeviceTargetEnd, ReplyViews
from engine.channel.host import host_id
from engine.channel.interface import ChannelSpec, DrafterChannel, ReplyEntry, RingEntry, TargetChannel
from engine.channel.memory import reap
from engine.channel.opening import (
    DEVICE_KINDS,
    KINDS,
    attach_device_channel,
    attach_drafter_channel,
    choose_kind,
    describe,
    device_uuid,
    kinds_of,
    open_device_channel,
    open_target_channel,
)

__all__ = [
    "DEVICE_KINDS",
    "KINDS",
    "BytesDrafterEnd",
    "BytesTargetEnd",
    "ChannelDescription",
    "ChannelSpec",
    "DeviceDrafterEnd",
    "DeviceTargetEnd",
    "DrafterChannel",
    "EntryMessage",
    "RegionDescription",
    "ReplyEntry",
    "ReplyViews",
    "RingEntry",
    "TargetChannel",
    "attach_device_channel",
    "attach_drafter_channel",
    "choose_kind",
    "describe",
    "device_uuid",
    "host_id",
    "kinds_of",
    "open_device_channel",
    "open_target_channel",
    "reap",
]
